"""Mutation testing: break one line of raycl at a time and run the tests that should fail.

``python -m tests.mutations`` applies each mutation to a copy of the repository and runs its tests.
``python -m tests.mutations queue`` selects mutations with this word in their title or file. The command
prints one line per mutation and exits with status 1 if a mutation is not detected.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mutation:
    """A mutation: a file, the text to replace, its replacement, and the tests that should fail: by default plain steps."""

    title: str
    path: str
    before: str
    after: str
    tests: str = "tests/test_plain_steps.py"


MUTATIONS = [
    # A step
    Mutation(
        "the momentum encoder is updated before the optimizer step",
        "raycl/training/step.py",
        "grad_norm = state.update()\n        state.update_momentum_encoder(momentum)",
        "state.update_momentum_encoder(momentum)\n        grad_norm = state.update()",
    ),
    Mutation(
        "a query of a symmetric loss has its own view as the key",
        "raycl/training/train_state.py",
        "if other != view",
        "if other == view",
    ),
    Mutation(
        "the keys pass the prediction head",
        "raycl/training/train_state.py",
        "[normalize(each, dim=1) for each in keys",
        "[prediction_head(each) for each in keys",
    ),
    Mutation(
        "the gradient of the prediction head stays the worker's own",
        "raycl/training/train_state.py",
        "filter(None, (self.prediction_head, self.temperature)):\n            yield",
        "filter(None, (self.temperature,)):\n            yield",
        "tests/workers/test_step.py",
    ),
    Mutation(
        "the store is updated twice per step",
        "raycl/training/step.py",
        "        store.update(step=step)\n",
        "        store.update(step=step)\n        store.update(step=step)\n",
    ),
    Mutation(
        "the learning rate of the step is ignored",
        "raycl/training/step.py",
        "    set_learning_rate(state.optimizer, learning_rate)\n",
        "    set_learning_rate(state.optimizer, 0.02)\n",
    ),
    Mutation(
        "the reported loss is the local loss of the worker",
        "raycl/training/step.py",
        "value = total / num_workers()",
        "value = loss.item()",
        "tests/workers/test_step.py",
    ),
    Mutation(
        "a step is taken with a loss that is not finite",
        "raycl/training/step.py",
        "if not math.isfinite(value):",
        "if False:",
        "tests/workers/test_step.py tests/test_training_stores.py tests/cluster/test_run.py",
    ),
    # Mined negatives
    Mutation(
        "a known match becomes a mined negative",
        "raycl/training/miner.py",
        "kept = np.flatnonzero((documents >= 0) & ~np.isin(documents, known))[:k]",
        "kept = np.flatnonzero(documents >= 0)[:k]",
        "tests/test_mined.py",
    ),
    Mutation(
        "an unshown caption of an image in the batch is a negative of it",
        "raycl/training/transforms.py",
        "own = torch.from_numpy(texts.tokens.text_id[begin[:, None] + numbers])",
        "own = ids.key[:, :1].repeat(1, corpus.most_texts)",
        "tests/test_mined_lists.py",
    ),
    Mutation(
        "a new miner of a stream does not get the known rows",
        "raycl/training/mining.py",
        '            self._num_restarts += self._incarnation != ""\n            self._send_rows()',
        '            self._num_restarts += self._incarnation != ""',
        "tests/test_mined_stream.py",
    ),
    Mutation(
        "a random negative may match its query",
        "raycl/training/mined.py",
        'np.searchsorted(before, place, side="right")',
        "0",
        "tests/test_mined.py",
    ),
    Mutation(
        "the draws of mined negatives are the same in every epoch",
        "raycl/training/mined.py",
        "epoch=batch.epoch, view=0, num=size",
        "epoch=0, view=0, num=size",
        "tests/test_mined.py",
    ),
    Mutation(
        "each worker keeps its own table",
        "raycl/training/mining.py",
        "            into.copy_(all_sum(own.to(self._device)))",
        "            into.copy_(own)",
        "tests/workers/test_mined.py",
    ),
    # Encoding of views
    Mutation(
        "MoCo keys are computed from the view of the query",
        "raycl/training/views.py",
        "view = self.second_view()",
        "view = self.view_a",
    ),
    Mutation(
        "a key of the pool counts as made in the step that uses it",
        "raycl/training/key_encoders.py",
        "stamps[part.in_batch] = encoded.step",
        "stamps[part.in_batch] = step",
        "tests/test_key_encoders.py",
    ),
    Mutation(
        "the keys of mixed batches return in another order",
        "raycl/training/key_encoders.py",
        "place = order.argsort()",
        "place = order",
        "tests/test_key_encoders.py",
    ),
    Mutation(
        "views have the same shuffle at every step",
        "raycl/training/train_state.py",
        "rows, seed=self._seed, step=step)",
        "rows, seed=self._seed, step=0)",
    ),
    Mutation(
        "keys are encoded by the query tower",
        "raycl/training/train_state.py",
        "keys = self._in_chunks(towers.key_tower, views.keys())",
        "keys = self._in_chunks(towers.query, views.keys())",
    ),
    Mutation(
        "the learned temperature's gradient is not averaged",
        "raycl/training/train_state.py",
        "(self.prediction_head, self.temperature)):\n            yield",
        "(self.prediction_head,)):\n            yield",
        "tests/workers",
    ),
    Mutation(
        "the temperature is not clamped to its minimum",
        "raycl/training/train_state.py",
        "self.temperature.clamp_()",
        "pass",
        "tests/test_pairs.py",
    ),
    Mutation(
        "momentum and its complement are swapped",
        "raycl/models/momentum.py",
        "targets, 1.0 - momentum)",
        "targets, momentum)",
        "tests/test_momentum.py",
    ),
    Mutation(
        "embeddings are not normalized",
        "raycl/models/towers.py",
        "return F.normalize(projected, dim=1) if self._normalize else projected",
        "return projected",
    ),
    Mutation(
        "weight decay applies to biases",
        "raycl/optim.py",
        '"weight_decay": 0.0 if is_vector else weight_decay,',
        '"weight_decay": weight_decay,',
        "tests/test_optim.py tests/test_plain_steps.py",
    ),
    Mutation(
        "muon skips Nesterov's look ahead",
        "raycl/optim.py",
        "torch._foreach_lerp(gradients, buffers, momentum)",
        "buffers",
        "tests/test_optim.py",
    ),
    Mutation(
        "muon orthogonalizes embeddings",
        "raycl/optim.py",
        "parameter.ndim in (2, 4) and parameter not in self._tables",
        "parameter.ndim in (2, 4)",
        "tests/test_optim.py",
    ),
    Mutation(
        "a batch has a class twice",
        "raycl/data/sampler.py",
        "batch_size // samples_per_class, replace=False)",
        "batch_size // samples_per_class, replace=True)",
        "tests/test_class_batches.py",
    ),
    Mutation(
        "a window does not begin with its largest classes",
        "raycl/data/sampler.py",
        "np.lexsort((rng.random(len(left)), -left))",
        "np.lexsort((rng.random(len(left)), left == 0))",
        "tests/test_class_batches.py",
    ),
    # Losses over all workers
    Mutation(
        "InstDisc noise includes the slot of the query",
        "raycl/losses/nce.py",
        "            sample_id=ids.query,\n            noise_id=stored.negative_id,\n        )\n        return add_proximal_term",
        "        )\n        return add_proximal_term",
    ),
    Mutation(
        "the normalizer of InstDisc includes the slot of the query",
        "raycl/losses/nce.py",
        "                sample_id=ids.query,\n                noise_id=stored.negative_id,\n            )\n            self.normalizer",
        "            )\n            self.normalizer",
    ),
    Mutation(
        "the weights of hinge and cross-entropy are swapped",
        "raycl/losses/objective.py",
        "entropy.lerp(self.hinge(query, key, stored, ids), self.hinge_weight)",
        "entropy.lerp(self.hinge(query, key, stored, ids), 1 - self.hinge_weight)",
    ),
    Mutation(
        "the proximal term is omitted",
        "raycl/losses/objective.py",
        "    return loss + weight * proximal_term(query, stored.key, row_weight)",
        "    return loss",
    ),
    Mutation(
        "keys of all workers are gathered without gradient",
        "raycl/losses/objective.py",
        "gather(each) if each.is_floating_point() else gather_detached(each)",
        "gather_detached(each)",
        "tests/workers/test_objectives.py",
    ),
    Mutation(
        "every worker uses the rows of the first worker as its own",
        "raycl/losses/objective.py",
        '"offset": rank() * len(first)',
        '"offset": 0',
        "tests/workers/test_objectives.py",
    ),
    Mutation(
        "every worker uses the views of the first worker as its own",
        "raycl/losses/views.py",
        "gather_detached(ids), rank() * len(ids)",
        "gather_detached(ids), 0",
        "tests/workers/test_objectives.py",
    ),
    Mutation(
        "the gradient of a view as a positive of another view is missing",
        "raycl/losses/views.py",
        "to_columns[b].addcmul_(share, views[a], value=-1)",
        "pass",
        "tests/test_nt_xent.py",
    ),
    Mutation(
        "poly_view forgets the share of a positive in the gradient",
        "raycl/losses/poly_view.py",
        "log_share.exp() * excess.sigmoid()",
        "excess.sigmoid()",
        "tests/test_poly_view.py",
    ),
    Mutation(
        "NNCLR searches the neighbor of the prediction instead of the other view",
        "raycl/losses/nnclr.py",
        "classify(nearest_rows(key, stored.negatives), query",
        "classify(nearest_rows(query, stored.negatives), query",
    ),
    Mutation(
        "the queue of NNCLR holds predictions",
        "raycl/training/train_state.py",
        "return Embedded(queries[0], keys[1], pairs=pairs, key_step=key_step)",
        "return Embedded(queries[0], queries[1], pairs=pairs)",
    ),
    Mutation(
        "the predictions that NNCLR compares are this worker's own",
        "raycl/losses/nnclr.py",
        "return classify(nearest_rows(key, stored.negatives), query, StoreBatch(), ids)",
        """return nnclr(query, key, stored.negatives, temperature=self.temperature, sample_id=ids.query)""",
        "tests/workers/test_objectives.py",
    ),
    Mutation(
        "the stored partition function has the weight of the new one",
        "raycl/losses/gcl.py",
        "torch.logaddexp(stored + math.log(momentum), new + math.log1p(-momentum))",
        "torch.logaddexp(stored + math.log1p(-momentum), new + math.log(momentum))",
        "tests/test_gcl.py",
    ),
    Mutation(
        "the weights of the global loss ignore the stored partition functions",
        "raycl/losses/gcl.py",
        "(log_partition + self._log_in_batch) * LOG2_E)",
        "(of_batch + self._log_in_batch) * LOG2_E)",
        "tests/test_gcl.py",
    ),
    Mutation(
        "the partition functions of queries and documents are swapped",
        "raycl/losses/gcl.py",
        "for of_side in stored.partition.stored.unbind(1)",
        "for of_side in stored.partition.stored.flip(1).unbind(1)",
        "tests/test_gcl.py",
    ),
    Mutation(
        "the positives of pairs have the weight 1 if u is outdated",
        "raycl/losses/gcl.py",
        "torch.where(total == 0, 0.0, (of_batch - log_partition).exp())",
        "torch.where(total == 0, 0.0, 1.0)",
        "tests/test_gcl.py",
    ),
    Mutation(
        "the documents of local pairs have the loss of the queries",
        "raycl/losses/mutual.py",
        "column_loss(positive, *of_columns, everything)",
        "row_loss(positive, *of_columns, everything)",
        "tests/test_gcl.py",
    ),
    Mutation(
        "the global loss of pairs ignores the weights of rows in a ring",
        "raycl/losses/info_nce.py",
        "row_loss=weighted(row_loss, checked_weight(weight, query)),\n            with_gradient",
        "row_loss=row_loss,\n            with_gradient",
        "tests/workers/test_objectives.py",
    ),
    Mutation(
        "the global loss of a ring counts this worker's negatives only",
        "raycl/losses/gcl.py",
        "    return num_workers() * len(views[0])",
        "    return len(views[0])",
        "tests/workers/test_objectives.py",
    ),
    Mutation(
        "a memory bank restores no rows in its actors",
        "raycl/negatives/actor.py",
        "for saved in chain.steps:",
        "for saved in ():",
        "tests/cluster/test_negatives.py",
    ),
    Mutation(
        "poly_view counts the other positives among the candidates",
        "raycl/losses/views.py",
        "excluded=tuple(own) if exclude_samples else (own[view],)",
        "excluded=(own[view],)",
        "tests/test_poly_view.py",
    ),
    Mutation(
        "the log-frequency of keys is not subtracted",
        "raycl/losses/clip.py",
        'own["key_log_frequency"] = self.log_frequency(ids.stored_key)',
        "pass",
    ),
    Mutation(
        "the log-frequency of explicit negatives is not subtracted",
        "raycl/losses/clip.py",
        'others["negative_log_frequency"] = self.log_frequency(stored.negative_name)',
        "pass",
    ),
    Mutation(
        "the refined log-Q correction counts the positive among the drawn documents",
        "raycl/losses/logq.py",
        "num_negatives=num_candidates - matches",
        "num_negatives=num_candidates - matches + 1",
        "tests/test_bidirectional.py",
    ),
    Mutation(
        "the refined log-Q correction does not exclude the positive from Q",
        "raycl/losses/logq.py",
        "log_frequency - torch.log1p(-log_frequency.exp())",
        "log_frequency",
        "tests/test_bidirectional.py",
    ),
    Mutation(
        "a ring forgets the log-frequency in the gradient of its columns",
        "raycl/losses/ring.py",
        "tile += bias[block, None]",
        "pass",
        "tests/workers/test_objectives.py",
    ),
    Mutation(
        "the gradient of negatives ignores the weight of its row",
        "raycl/losses/softmax.py",
        "of_positives * positive_weight, logsumexp - own.log2()",
        "of_positives * positive_weight, logsumexp",
        "tests/test_row_weights.py",
    ),
    Mutation(
        "weights have a mean of 1 on each worker, not over all workers",
        "raycl/losses/example_ids.py",
        "all_sum(weight.sum())",
        "weight.sum() * num_workers()",
        "tests/workers/test_objectives.py",
    ),
    Mutation(
        "a ring pulls the rows of SupCon without the weights of the others",
        "raycl/losses/supcon.py",
        "weight[:, None] * views",
        "views",
        "tests/workers/test_objectives.py",
    ),
    Mutation(
        "the weights of a batch are those of other rows",
        "raycl/training/views.py",
        "torch.from_numpy(weight)",
        "torch.from_numpy(weight[::-1].copy())",
        "tests/test_row_weights.py",
    ),
    Mutation(
        "a row of SupCon is its own positive",
        "raycl/losses/supcon.py",
        "self._share * (totals[self._own] - self._rows)",
        "self._share * totals[self._own].repeat(2, 1, 1)",
        "tests/test_supcon.py",
    ),
    Mutation(
        "unlabeled samples share one class",
        "raycl/losses/example_ids.py",
        "torch.where(label >= 0, label, ~(query_id & torch.iinfo(torch.int64).max))",
        "label",
        "tests/test_supcon.py",
    ),
    Mutation(
        "explicit negatives beyond the capacity of a message are dropped",
        "raycl/losses/example_ids.py",
        "        if most > self._capacity:\n",
        "        if most > 2**40:\n",
        "tests/workers/test_pairs.py",
    ),
    Mutation(
        "NT-Xent keeps false negatives",
        "raycl/losses/mutual.py",
        "self._mask.apply_(tile, across, down)",
        "pass",
        "tests/test_nt_xent.py",
    ),
    Mutation(
        "the gradient of gathered rows is averaged over the workers",
        "raycl/distributed/collectives.py",
        "return all_sum(grad).narrow(",
        "return (all_sum(grad) / num_workers()).narrow(",
        "tests/workers",
    ),
    Mutation(
        "ids of rows with two names are not merged",
        "raycl/losses/example_ids.py",
        "    return least[component]\n",
        "    return ids\n",
        "tests/test_plain_steps.py tests/test_pairs.py tests/workers/test_pairs.py",
    ),
    Mutation(
        "queued negatives keep their names instead of merged ids",
        "raycl/losses/example_ids.py",
        "return torch.where(self.names[place] == name, self.name_ids[place], name)",
        "return name",
    ),
    Mutation(
        "a guide masks negatives farther than the positive by the margin",
        "raycl/losses/guide.py",
        "similarity - margin *",
        "similarity + margin *",
        "tests/test_guide.py",
    ),
    Mutation(
        "a guide masks a negative as near as the positive",
        "raycl/losses/guide.py",
        "lowered + TOLERANCE",
        "lowered - TOLERANCE",
        "tests/test_guide.py",
    ),
    Mutation(
        "a guide has queries in the place of keys from keys to queries",
        "raycl/losses/guide.py",
        "query=self.key, key=self.query, negatives=None",
        "query=self.query, key=self.key, negatives=None",
        "tests/test_guide.py",
    ),
    Mutation(
        "a guide counts the positive and false negatives by id",
        "raycl/losses/guide.py",
        "is_candidate = tile > -torch.inf",
        "is_candidate = tile < torch.inf",
        "tests/test_guide.py",
    ),
    Mutation(
        "a guide masks by the embeddings of this worker",
        "raycl/losses/guide.py",
        "gather_detached(getattr(self, name))",
        "getattr(self, name).repeat(num_workers(), *[1] * (getattr(self, name).ndim - 1))",
        "tests/workers/test_objectives.py",
    ),
    Mutation(
        "a guide masks by the limits of keys in the second round of a ring",
        "raycl/losses/guide.py",
        "limit=self.limit if transposed else self.limit[own, None]",
        "limit=self.limit[own, None]",
        "tests/workers/test_objectives.py",
    ),
    Mutation(
        "a guide finds queries among the documents",
        "raycl/training/guide.py",
        "            self.query.of(query_id),\n            self.document.of(document_id),",
        "            self.document.of(document_id),\n            self.query.of(query_id),",
        "tests/test_guide.py",
    ),
    Mutation(
        "a missing embedding of a guide is zero",
        "raycl/training/guide.py",
        "if not is_found.all():",
        "if not is_found.any():",
        "tests/test_guide.py",
    ),
    # BatchNorm
    Mutation(
        "synchronized BatchNorm averages the variances of the workers",
        "raycl/batchnorm/kernels.py",
        "(share * (variances + (means - mean).square_())).sum(",
        "(share * variances).sum(",
        "tests/workers/test_batchnorm.py tests/test_cures.py",
    ),
    Mutation(
        "the running variance of synchronized BatchNorm is biased",
        "raycl/batchnorm/kernels.py",
        "self.variance * (self.num_values / (self.num_values - 1))",
        "self.variance",
        "tests/workers/test_batchnorm.py",
    ),
    Mutation(
        "shuffled rows are not restored to their order",
        "raycl/batchnorm/shuffled.py",
        "return embeddings.index_select(0, back)",
        "return embeddings[own]",
    ),
    Mutation(
        "groups of split BatchNorm are twice as large",
        "raycl/batchnorm/split.py",
        "            layer.group_size = group_size",
        "            layer.group_size = 2 * group_size",
    ),
    # Negatives
    Mutation(
        "the noise is the same at every step",
        "raycl/training/stores.py",
        "drawn = self._bank.draw(self._num_negatives, step=step)",
        "drawn = self._bank.draw(self._num_negatives, step=0)",
    ),
    Mutation(
        "the age of the queue's rows is off by one",
        "raycl/training/stores.py",
        "_ages(self._queue.negatives().step, step + 1)",
        "_ages(self._queue.negatives().step, step)",
        "tests/test_training_stores.py",
    ),
    Mutation(
        "the age of bank rows includes unwritten slots",
        "raycl/training/stores.py",
        "_ages(fetched[fetched >= 0], step)",
        "_ages(fetched, step)",
        "tests/test_training_stores.py",
    ),
    Mutation(
        "the queue keeps the oldest keys of an oversized push",
        "raycl/negatives/queue.py",
        "kept = Negatives(rows, ids, new.step)[len(rows) - num_kept :]",
        "kept = Negatives(rows, ids, new.step)[:num_kept]",
        "tests/test_stores.py",
    ),
    Mutation(
        "a restarted actor does not get its lost keys",
        "raycl/negatives/client.py",
        "            if answer.sequence < self.queue.sequence:\n",
        "            if False:\n",
        "tests/test_bank_faults.py",
    ),
    Mutation(
        "an actor that dies while saving leaves an incomplete snapshot",
        "raycl/negatives/client.py",
        "        while incarnation != self._actor.incarnation:\n",
        "        while not incarnation:\n",
        "tests/test_bank_faults.py",
    ),
    Mutation(
        "a worker that calls a shard sends its rows in the order of slots instead of receivers",
        "raycl/training/group_bank.py",
        'order = np.argsort(receivers, kind="stable")',
        "order = np.arange(len(receivers))",
        "tests/workers/test_group_bank.py",
    ),
    Mutation(
        "the slots of the step after the next are drawn for the next step",
        "raycl/training/group_bank.py",
        "            self._ask(self._own_slots, step + 2)\n",
        "            self._ask(self._own_slots, step + 1)\n",
        "tests/workers/test_group_bank.py",
    ),
    Mutation(
        "a repeated update is applied twice",
        "raycl/negatives/actor.py",
        "            if serial > self._applied.get(client, 0):\n",
        "            if True:\n",
        "tests/test_bank_faults.py tests/test_bank_actor.py",
    ),
    Mutation(
        "a shard continues a snapshot that never became the current one",
        "raycl/negatives/actor.py",
        "before = self._chain if self._chain.steps[-1:] == (current,) else snapshot.Chain()",
        "before = self._chain",
        "tests/test_bank_faults.py",
    ),
    Mutation(
        "an increment lacks the initialized rows",
        "raycl/negatives/memory_bank.py",
        "        self._is_unsaved[positions] = True\n        self._calls = []\n\n    def unsaved",
        "        self._calls = []\n\n    def unsaved",
        "tests/test_bank_faults.py",
    ),
    Mutation(
        "pruning deletes the base of an increment",
        "raycl/negatives/snapshot.py",
        ".difference(*(_read_needs(spec, step) for step in kept))",
        ".difference(kept)",
        "tests/test_bank_actor.py tests/test_bank_faults.py",
    ),
    Mutation(
        "the newest step of an answer is that of the first shard",
        "raycl/negatives/bank.py",
        "newest_step=max(newest)",
        "newest_step=newest[0]",
        "tests/test_bank_faults.py",
    ),
    Mutation(
        "a slot of the memory bank is replaced instead of averaged",
        "raycl/negatives/memory_bank.py",
        "    mixed *= momentum\n    mixed += (1 - momentum) * directions",
        "    mixed *= 0\n    mixed += directions",
    ),
    Mutation(
        "the normalizing constant ignores its previous value",
        "raycl/losses/nce.py",
        "weights = torch.tensor([self._momentum, 1 - self._momentum]",
        "weights = torch.tensor([0.0, 1.0]",
    ),
    # Views and sampling
    Mutation(
        "every epoch has the same views",
        "raycl/training/transforms.py",
        "            epoch=batch.epoch,\n            view=number,",
        "            epoch=0,\n            view=number,",
        "tests/test_views.py",
    ),
    Mutation(
        "both views are the same",
        "raycl/training/transforms.py",
        "            epoch=batch.epoch,\n            view=number,",
        "            epoch=batch.epoch,\n            view=0,",
        "tests/test_views.py",
    ),
    Mutation(
        "a view depends on the position of the row in the batch",
        "raycl/training/transforms.py",
        "drawn = augmentation.draw(\n            batch.sample_id,",
        "drawn = augmentation.draw(\n            np.arange(len(batch)),",
        "tests/test_views.py",
    ),
    Mutation(
        "all views have the crop scale of the first entry",
        "raycl/training/transforms.py",
        "crop_scale=views.crop_scale or config.augment.crop_scale,",
        "crop_scale=config.views[0].crop_scale or config.augment.crop_scale,",
        "tests/test_views.py",
    ),
    Mutation(
        "small views keep their size in a stage of another size",
        "raycl/training/transforms.py",
        "replace(each, size=scaled_size(each.size, full=full, new_full=size))",
        "replace(each, size=size if each.size == full else each.size)",
        "tests/test_views.py",
    ),
    Mutation(
        "two views of full size count as much as a view and a crop",
        "raycl/losses/view_pairs.py",
        "ViewPair(query, key, 2.0)",
        "ViewPair(query, key, 1.0)",
    ),
    Mutation(
        "crops are compared with the first view only",
        "raycl/losses/view_pairs.py",
        "for query in crops for key in full]",
        "for query in crops for key in full[:1]]",
    ),
    Mutation(
        "BatchNorm spans one view",
        "raycl/training/train_state.py",
        "number if by_view else None",
        "number",
    ),
    Mutation(
        "a momentum encoder ignores the crops",
        "raycl/training/train_state.py",
        "self._encode_by_size(views.view_a, *views.further, *views.crops)",
        "self._encode_by_size(views.view_a, *views.further)",
    ),
    Mutation(
        "a stage ignores its image size",
        "raycl/training/views.py",
        "Prefetched(batches)), image_size=image_size)",
        "Prefetched(batches)))",
        "tests/test_epochs.py",
    ),
    Mutation(
        "the memory of a stage is measured at the run's image size",
        "raycl/doctor/memory_profile.py",
        "for size in config.views_by_size(stage)]",
        "for size in [config.data.image_size]]",
        "tests/test_doctor.py",
    ),
    Mutation(
        "every epoch has the same order",
        "raycl/data/sampler.py",
        "rng = np.random.default_rng((self.seed, epoch))",
        "rng = np.random.default_rng((self.seed, 0))",
        "tests/test_order.py",
    ),
    Mutation(
        "every worker reads the rows of the first",
        "raycl/data/sampler.py",
        "slice(self.rank * self.local_batch_size, (self.rank + 1) * self.local_batch_size)",
        "slice(0, self.local_batch_size)",
        "tests/test_order.py",
    ),
    Mutation(
        "training includes the held-out rows",
        "raycl/data/split.py",
        '"""Whether each row is a training row."""\n        return _unit_hash(self.seed, sample_id) >= self.test',
        '"""Whether each row is a training row."""\n        return _unit_hash(self.seed, sample_id) >= 0',
        "tests/test_order.py tests/test_data.py tests/test_epochs.py",
    ),
    Mutation(
        "the training loop reads the held-out rows",
        "raycl/training/step_runner.py",
        "train_rows = [each.where(job.holdout.is_train) for each in data_sets]",
        "train_rows = data_sets",
        "tests/cluster/test_run.py",
    ),
    Mutation(
        "every epoch draws the data sets in the same order",
        "raycl/data/mixed.py",
        "rng = np.random.default_rng((self.seed, epoch))",
        "rng = np.random.default_rng((self.seed, 0))",
        "tests/test_mixed.py",
    ),
    Mutation(
        "a resumed epoch starts each data set over",
        "raycl/data/mixed.py",
        "epoch * count + before",
        "epoch * count",
        "tests/test_mixed.py",
    ),
    Mutation(
        "a data set that was used up starts over in the same order",
        "raycl/data/mixed.py",
        "number, start = number + 1, 0",
        "number, start = number, 0",
        "tests/test_mixed.py",
    ),
    Mutation(
        "the weights of data sets are ignored",
        "raycl/data/mixed.py",
        "counts = batch_counts(passes, self.weights)",
        "counts = batch_counts(passes)",
        "tests/test_mixed.py",
    ),
    Mutation(
        "data sets of equal sizes have the same order of rows",
        "raycl/training/views.py",
        "sampler(rows, hash((config.seed, number)) % 2**63)",
        "sampler(rows, config.seed)",
        "tests/test_mixed.py",
    ),
    Mutation(
        "fragments of equal names in two data sets are counted once",
        "raycl/data/decode.py",
        'add_rows.remote(f"{self.prefix}{name}", stats)',
        "add_rows.remote(name, stats)",
        "tests/cluster/test_mixed.py",
    ),
    Mutation(
        "rows of a batch are not shuffled",
        "raycl/data/in_memory.py",
        "in zip(part, inside, strict=True)",
        "in sorted(zip(part, inside, strict=True))",
        "tests/test_data.py",
    ),
    Mutation(
        "invalid rows of a fragment read twice are counted twice",
        "raycl/training/coordinator.py",
        "self._fragments[fragment] = stats",
        "self._fragments[fragment + str(len(self._fragments))] = stats",
        "tests/test_data.py",
    ),
    Mutation(
        "text ids use Python's hash, which differs between processes",
        "raycl/data/ids.py",
        'return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)',
        "return hash(content)",
        "tests/test_data.py",
    ),
    Mutation(
        "quotes that never close swallow the last rows of a CSV file",
        "raycl/data/csv_tables.py",
        "if set(last.values()) != {_LAST}:",
        "if not last:",
        "tests/test_table_files.py",
    ),
    Mutation(
        "the text NA of a CSV file is a missing value",
        "raycl/data/csv_tables.py",
        'null_values=[""]',
        'null_values=["", "NA"]',
        "tests/test_table_files.py",
    ),
    Mutation(
        "damage in the middle of a tar is its end",
        "raycl/data/tar_tables.py",
        "tarinfo=_Member",
        "tarinfo=tarfile.TarInfo",
        "tests/test_tar_tables.py",
    ),
    Mutation(
        "values that Hugging Face's datasets computed from the data are data",
        "raycl/data/sources.py",
        "path not in unread",
        "path",
        "tests/test_arrow_tables.py",
    ),
    Mutation(
        "a fragment of a text file begins at the first row of the file",
        "raycl/data/tables.py",
        "max(start - position, 0)",
        "0",
        "tests/test_table_files.py",
    ),
    Mutation(
        "rows that a Delta table deleted by a vector are read",
        "raycl/data/delta_tables.py",
        "if _has_deletions(table, place):",
        "if False:",
        "tests/test_table_files.py",
    ),
    Mutation(
        "a column of Iceberg is another one that had its name",
        "raycl/data/iceberg_tables.py",
        "if found != ids:",
        "if False:",
        "tests/test_table_files.py",
    ),
    Mutation(
        "a task reads a later version of a Lance table than the run",
        "raycl/data/lance_tables.py",
        "return _open(uri, version)",
        "return _open(uri)",
        "tests/test_table_files.py",
    ),
    # Stages, checkpoints, records
    Mutation(
        "the batch grows with the workers of a MIN:MAX range",
        "raycl/data/sampler.py",
        "return self.batch_size // self.num_workers",
        "return self.batch_size // 2",
        "tests/test_order.py",
    ),
    Mutation(
        "fewer workers than requested reduce the global batch",
        "raycl/training/step_runner.py",
        "size, workers = self.plan.stage.batch_size, num_workers()",
        "workers = num_workers()\n        size = self.plan.stage.batch_size * workers // self._job.config.workers",
        "tests/cluster/test_stages.py tests/cluster/test_run.py tests/cluster/test_survival.py",
    ),
    Mutation(
        "the reported throughput counts one worker",
        "raycl/training/loop.py",
        "seconds, timing = self._logger.clock.lap(position.samples)\n",
        "seconds, timing = self._logger.clock.lap(position.samples // num_workers())\n",
        "tests/cluster/test_run.py",
    ),
    Mutation(
        "workers may have different numbers of rows",
        "raycl/training/step_runner.py",
        '        check_equal(sum(map(len, train_rows)), "the number of training rows")\n',
        "",
        "tests/workers/test_distributed.py",
    ),
    Mutation(
        "a line falls from the peak along a cosine",
        "raycl/training/stages.py",
        '"linear": linear(peak, 0.0,',
        '"linear": cosine(peak, 0.0,',
        "tests/test_like.py",
    ),
    Mutation(
        "the temperature of lightly's example is another",
        "raycl/recipes/like.py",
        '"stages.0.temperature": 0.5,',
        '"stages.0.temperature": 0.51,',
        "tests/test_like.py",
    ),
    Mutation(
        "open_clip's weight decay is the recipe's",
        "raycl/recipes/like.py",
        '"optimizer.weight_decay": 0.2,',
        '"optimizer.weight_decay": 0.1,',
        "tests/test_like.py",
    ),
    Mutation(
        "the learning rate of sentence-transformers follows another schedule",
        "raycl/recipes/like.py",
        '"stages.0.learning_rate_schedule": "linear",',
        '"stages.0.learning_rate_schedule": "cosine",',
        "tests/test_like.py",
    ),
    Mutation(
        "local_view normalizes both views together",
        "raycl/training/train_state.py",
        'by_view=config.batchnorm == "local_view",',
        "by_view=False,",
        "tests/test_like.py",
    ),
    Mutation(
        "the warmup is skipped",
        "raycl/training/stages.py",
        "warmup = min(round(stage.warmup_epochs * steps_per_epoch), num_steps // 10)",
        "warmup = 0",
        "tests/test_stage_plan.py",
    ),
    Mutation(
        "the learning rate does not scale with the batch size",
        "raycl/config/stage.py",
        "ratio = self.batch_size / 256",
        "ratio = 1.0",
        "tests/test_config.py tests/test_stage_plan.py",
    ),
    Mutation(
        "an inactive setting is accepted",
        "raycl/config/overrides.py",
        "if not is_default and (problem := why_inactive(config, setting)):",
        "if is_default and (problem := why_inactive(config, setting)):",
        "tests/test_active_settings.py",
    ),
    Mutation(
        "a setting is active although a condition of its section fails",
        "raycl/config/conditions.py",
        "for length in range(1, len(parts) + 1):",
        "for length in range(len(parts), len(parts) + 1):",
        "tests/test_active_settings.py",
    ),
    Mutation(
        "the hinge weight follows no schedule",
        "raycl/training/stages.py",
        "hinge_weight=constant(first) if last is None else linear(",
        "hinge_weight=constant(first) if True else linear(",
        "tests/test_stage_plan.py",
    ),
    Mutation(
        "a resumed epoch restarts from its beginning",
        "raycl/training/views.py",
        "epoch=epoch, start=start, continues=continues",
        "epoch=epoch, start=0, continues=continues",
        "tests/test_epochs.py",
    ),
    Mutation(
        "checkpoints do not contain the optimizer state",
        "raycl/training/train_state.py",
        '            "optimizer": self.optimizer,\n',
        "",
        "tests/test_on_device.py tests/test_training_stores.py tests/cluster/test_run.py",
    ),
    Mutation(
        "files are written in place",
        "raycl/storage.py",
        'partial = posixpath.join(folder, f".{name}.{uuid.uuid4().hex}") if self.is_local else path',
        "partial = path",
        "tests/test_storage.py",
    ),
    Mutation(
        "the first curve of a report shows the wrong metric",
        "raycl/report/sections.py",
        "[_plot(history[name], PLOTS[name], timeline) for",
        '[_plot(history["samples"], PLOTS[name], timeline) for',
        "tests/test_report.py",
    ),
    Mutation(
        "a command is missing from the page of commands",
        "docs/commands.md",
        "| `raycl mine` | add an encoder's nearest documents to pairs as hard negatives |\n",
        "",
        "tests/test_docs.py",
    ),
    # Recovery, replay and certificates
    Mutation(
        "goodput counts the steps that a lost group made in vain",
        "raycl/training/metrics_logger.py",
        "lost = pause + max(0.0, failure.seconds - resumed.seconds)",
        "lost = pause",
        "tests/test_phases.py",
    ),
    Mutation(
        "a failure counts all steps as repeated",
        "raycl/training/metrics_logger.py",
        "repeated = max(0, failure.step - resumed.step)",
        "repeated = failure.step",
        "tests/test_phases.py",
    ),
    Mutation(
        "goodput forgets the time of lost groups",
        "raycl/training/metrics_logger.py",
        "return max(time.time() - self._began, self.clock.seconds(), 1e-9)",
        "return max(self.clock.seconds(), 1e-9)",
        "tests/test_phases.py",
    ),
    Mutation(
        "a group that made no step hides the failure before it",
        "raycl/training/driver.py",
        "if earlier is not None and seen <= earlier.time:",
        "if False:",
        "tests/test_phases.py",
    ),
    Mutation(
        "a failure is reported at each step of the next group",
        "raycl/training/metrics_logger.py",
        "failure, self._failure, resumed = self._failure, None, self._position",
        "failure, resumed = self._failure, self._position",
        "tests/test_phases.py",
    ),
    Mutation(
        "checkpoints take a tenth of the time",
        "raycl/training/checkpoint.py",
        "_MAX_COST = 0.01",
        "_MAX_COST = 0.1",
        "tests/test_phases.py",
    ),
    Mutation(
        "checkpoints have no shortest interval",
        "raycl/training/checkpoint.py",
        "max(shortest, min(cost_s / _MAX_COST, 2.0 * last_s))",
        "min(cost_s / _MAX_COST, 2.0 * last_s)",
        "tests/test_phases.py",
    ),
    Mutation(
        "a resumed log keeps the lines of lost steps",
        "raycl/records.py",
        'if num_seen < num_rollbacks or line["step"] <= step:',
        "if True:",
        "tests/test_storage.py",
    ),
    Mutation(
        "a stream has the same order in every epoch",
        "raycl/data/windows.py",
        "default_rng((self.seed, epoch, number))",
        "default_rng((self.seed, number))",
        "tests/test_order.py",
    ),
    Mutation(
        "all windows of a stream have the same order",
        "raycl/data/windows.py",
        "default_rng((self.seed, epoch, number))",
        "default_rng((self.seed, epoch))",
        "tests/test_order.py",
    ),
    Mutation(
        "the last window of a stream is skipped",
        "raycl/data/windows.py",
        "        if size - left >= self.batch_size:\n            yield window",
        "        if size - left >= size:\n            yield window",
        "tests/test_order.py",
    ),
    Mutation(
        "a window of a stream loses the rows at the end of a block",
        "raycl/data/windows.py",
        "start, left = end, left - (end - start)",
        "start, left = stop, left - (end - start)",
        "tests/test_order.py",
    ),
    Mutation(
        "a worker of a stream gets the rows of the next one",
        "raycl/data/windows.py",
        "rows.arrow_rows(piece[:, rank].reshape(-1))",
        "rows.arrow_rows(piece[:, rank - 1].reshape(-1))",
        "tests/test_order.py",
    ),
    Mutation(
        "a resumed stream begins at its first window",
        "raycl/data/streaming.py",
        "first, skipped = divmod(start, cutter.num_batches)",
        "first, skipped = 0, start % cutter.num_batches",
        "tests/test_order.py tests/cluster/test_reading.py",
    ),
    Mutation(
        "a replay begins at the oldest checkpoint",
        "raycl/step_replay/restore.py",
        "for _, name in sorted(usable, reverse=True):",
        "for _, name in sorted(usable):",
        "tests/test_replay.py",
    ),
    Mutation(
        "a replay begins at a checkpoint that a rollback undid",
        "raycl/step_replay/restore.py",
        "if numbers[0] < step and run.is_kept(step, rollbacks=numbers[2])",
        "if numbers[0] < step",
        "tests/test_replay.py",
    ),
    Mutation(
        "a replay has one worker's dropout for all",
        "raycl/training/virtual_workers.py",
        "torch.manual_seed(dropout_seed(seed, step, worker))",
        "torch.manual_seed(dropout_seed(seed, step, 0))",
        "tests/workers/test_replay.py",
    ),
    Mutation(
        "a replay ignores the workers that made the step",
        "raycl/step_replay/restore.py",
        "seen = run.workers_between(first, last) if known is None else {known}",
        "seen = set[int]()",
        "tests/test_replay.py",
    ),
    Mutation(
        "a sample's steps are found one too early",
        "raycl/step_replay/find.py",
        'yield {"step": position.step + 1,',
        'yield {"step": position.step,',
        "tests/test_replay.py",
    ),
    Mutation(
        "the count of samples ignores the epoch",
        "raycl/chain.py",
        "+ mix(np.uint64(epoch + 1))",
        "",
        "tests/test_certify.py",
    ),
    Mutation(
        "the samples of a step are not counted",
        "raycl/training/run_chain.py",
        "self._new += hash_of_draw(views.ids, position.epoch)",
        "pass",
        "tests/test_certify.py",
    ),
    Mutation(
        "samples are counted again at each checkpoint",
        "raycl/training/run_chain.py",
        "        self._new = 0\n        if self._drawn",
        "        if self._drawn",
        "tests/test_certify.py",
    ),
    Mutation(
        "a resumed run forgets the samples of its checkpoint",
        "raycl/training/run_chain.py",
        '0 if restored is None else restored.get("drawn")',
        "0",
        "tests/test_certify.py",
    ),
    Mutation(
        "a rollback keeps the samples of undone steps",
        "raycl/training/run_chain.py",
        'self._drawn, self._new, self._losses = restored.get("drawn"), 0, {}',
        "self._losses = {}",
        "tests/test_certify.py",
    ),
    Mutation(
        "the losses of the chain are those of other steps",
        "raycl/training/run_chain.py",
        "self._losses[str(position.step + 1)] = loss",
        "self._losses[str(position.step)] = loss",
        "tests/test_certify.py",
    ),
    Mutation(
        "a link may be changed without its hash",
        "raycl/chain.py",
        'or link.get("hash") != _hash_of(link)',
        "",
        "tests/test_certify.py",
    ),
    Mutation(
        "a link may be removed",
        "raycl/chain.py",
        'if link.get("previous") != previous or',
        "if",
        "tests/test_certify.py",
    ),
    Mutation(
        "links of undone steps count",
        "raycl/chain.py",
        'before.append(saved.get(link.get("checkpoint") or ""))',
        "before.append(number - 1 if number else None)",
        "tests/test_certify.py",
    ),
    Mutation(
        "the log is compared by its length alone",
        "raycl/step_replay/check_history.py",
        'or heads[number] != link["log"]',
        "",
        "tests/test_certify.py",
    ),
    Mutation(
        "a swapped checkpoint passes",
        "raycl/step_replay/check_history.py",
        "if found.get(path) != bound[name]:",
        "if path not in found:",
        "tests/test_certify.py",
    ),
    Mutation(
        "an edited file passes",
        "raycl/step_replay/check_history.py",
        "if found.get(name) != value:\n                how",
        "if name not in found:\n                how",
        "tests/test_certify.py",
    ),
    Mutation(
        "a certificate may be edited",
        "raycl/step_replay/certificate.py",
        'found["sha256"] != _hash_of(values) or ',
        "",
        "tests/test_certify.py",
    ),
    Mutation(
        "the fingerprint of rows joins lists",
        "raycl/data/fingerprint.py",
        "cells = list(map(_with_length, _cells(values)))",
        "cells = list(_cells(values))",
        "tests/test_certify.py",
    ),
    Mutation(
        "other rows pass",
        "raycl/step_replay/check_rows.py",
        'if link["rows"] != found:',
        'if link["rows"] is None:',
        "tests/test_certify.py",
    ),
    Mutation(
        "skipped samples pass",
        "raycl/step_replay/check_rows.py",
        "if bound.get(step, {total}) != {total}:",
        "if step not in bound and False:",
        "tests/test_certify.py",
    ),
    Mutation(
        "any loss passes",
        "raycl/step_replay/recompute.py",
        "is_equal=difference <= (limit",
        "is_equal=difference <= 9 + (limit",
        "tests/test_certify.py",
    ),
    Mutation(
        "a process that stands ready takes the place of the job's own hook",
        "raycl/training/standby.py",
        "return {} if HOOK in own else",
        "return",
        "tests/test_process.py",
    ),
    Mutation(
        "a node that refused processes which stand ready is not asked again",
        "raycl/training/standby.py",
        "if request_standby(number, address=nodes[node]):",
        "if request_standby(number, address=nodes[node]) or True:",
        "tests/test_process.py",
    ),
    Mutation(
        "a loss right after a restart of the coordinator has no line",
        "raycl/training/driver.py",
        "if not _is_reported(earlier, job.output):",
        "if True:",
        "tests/test_phases.py",
    ),
    Mutation(
        "the initialized slots of a bank are written again",
        "raycl/training/checkpoint.py",
        "            store.save(step=position.step)\n            self._bank_step = position.step",
        "            store.save(step=position.step)\n            self._bank_step = position.step or None",
        "tests/test_loop.py",
    ),
    Mutation(
        "a certificate counts the held-out rows of a stream as drawn",
        "raycl/step_replay/rows.py",
        "keep = None if fragment.first_id in kept_whole else holdout.is_train",
        "keep = None",
        "tests/test_certify.py",
    ),
    Mutation(
        "a certificate continues a stream at its first window",
        "raycl/data/windows.py",
        "            if number < first:\n                continue",
        "            if number < 0:\n                continue",
        "tests/test_certify.py tests/cluster/test_reading.py",
    ),
    # Evaluation and metrics
    Mutation(
        "kNN votes without weights",
        "raycl/evaluation/knn.py",
        "return _vote(similarity, label, temperature)",
        "return _vote(0 * similarity, label, temperature)",
        "tests/test_knn.py",
    ),
    Mutation(
        "effective rank centers the rows",
        "raycl/evaluation/embedding_metrics.py",
        "exact = _clean(rows).cpu().double()\n",
        "exact = _clean(rows).cpu().double()\n    exact = exact - exact.mean(0)\n",
        "tests/test_embedding_metrics.py",
    ),
    Mutation(
        "recall counts the key of another pair",
        "raycl/training/evaluators.py",
        "is_right = ids[chosen][found] == wanted[:, None]",
        "is_right = chosen[found] == torch.arange(len(wanted))[:, None]",
        "tests/workers/test_pairs.py tests/test_pairs.py tests/test_retrieval_metrics.py",
    ),
    Mutation(
        "a query matches itself in retrieval",
        "raycl/training/evaluators.py",
        "for batch in _batches(test, bank)])",
        "for batch in _batches(test, bank)]).flip(0)",
        "tests/workers/test_pairs.py tests/test_pairs.py",
    ),
    # Searching for settings
    Mutation(
        "the recipe is halved away",
        "raycl/tuning/search.py",
        "return self.CONTINUE if is_kept else decision",
        "return decision",
        "tests/test_tune.py",
    ),
    Mutation(
        "a trial as good as the recipe replaces it",
        "raycl/tuning/plan.py",
        "(trial.scores[-1], trial.number == 0)",
        "(trial.scores[-1], trial.number)",
        "tests/test_tune.py",
    ),
    Mutation(
        "a good trial of an early rung wins",
        "raycl/tuning/plan.py",
        "if len(trial.scores) == num_rungs and not trial.error]",
        "if trial.scores and not trial.error]",
        "tests/test_tune.py",
    ),
    Mutation(
        "the plan ignores the start of each run",
        "raycl/tuning/plan.py",
        "(seconds - overhead_s) * rate",
        "seconds * rate",
        "tests/test_tune.py",
    ),
    Mutation(
        "a learned temperature is searched",
        "raycl/tuning/plan.py",
        "    if config.learn_temperature:",
        "    if False:",
        "tests/test_tune.py",
    ),
    Mutation(
        "the best settings are written at the end only",
        "raycl/tuning/search.py",
        "error=error)\n        self._write()",
        "error=error)",
        "tests/test_tune.py",
    ),
]


def main() -> int:
    """Run the tests of each mutation; return 1 if a mutation is not detected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mistakes whose title or file has one of these words")
    words = parser.parse_args().words
    chosen = [
        each for each in MUTATIONS if not words or any(word in each.title + each.path for word in words)
    ]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="raycl-") as folder:
        copy = Path(folder) / "raycl"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__"))
        for mutation in chosen:
            began = time.monotonic()
            noticed = is_noticed(mutation, copy)
            missed += not noticed
            seconds = time.monotonic() - began
            print(f"{'noticed' if noticed else 'MISSED':8} {seconds:4.0f} s  {mutation.title}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} noticed")
    return 1 if missed else 0


def is_noticed(mutation: Mutation, copy: Path) -> bool:
    """Apply a mutation to a copy of the repository, run its tests, and revert it."""
    path = copy / mutation.path
    plain = path.read_text()
    path.write_text(mutated(plain, mutation))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *mutation.tests.split()],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    finally:
        path.write_text(plain)
    assert done.returncode in (0, 1), f"{mutation.tests}: pytest ended with {done.returncode}"
    return done.returncode == 1


def mutated(text: str, mutation: Mutation) -> str:
    """Return the text of a file after the mutation."""
    assert text.count(mutation.before) == 1, f"{mutation.title}: {text.count(mutation.before)} places found"
    return text.replace(mutation.before, mutation.after)


if __name__ == "__main__":
    sys.exit(main())
