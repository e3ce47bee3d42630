"""Break raycl on purpose, one line at a time, and see which tests go red.

``python -m tests.mutations`` makes each of these mistakes in a copy of the repository and runs the tests
that should notice; ``python -m tests.mutations queue`` only those whose title or file has the word. It
prints a line for each, and exits with 1 if a mistake is not noticed.
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
STEPS = "tests/test_plain_steps.py"


@dataclass(frozen=True)
class Mutation:
    """A mistake: in a file, this text in place of that one; and the tests that should notice."""

    title: str
    path: str
    before: str
    after: str
    tests: str


MUTATIONS = [
    # A step
    Mutation(
        "the momentum encoder follows before the update",
        "raycl/training/step.py",
        "state.update()\n        state.update_momentum_encoder(momentum)",
        "state.update_momentum_encoder(momentum)\n        state.update()",
        STEPS,
    ),
    Mutation(
        "the keys are pushed into the store before the update, and twice",
        "raycl/training/step.py",
        "        store.update(step=step)\n",
        "        store.update(step=step)\n        store.update(step=step)\n",
        STEPS,
    ),
    Mutation(
        "the learning rate of the step is ignored",
        "raycl/training/step.py",
        "    set_learning_rate(state.optimizer, learning_rate)\n",
        "    set_learning_rate(state.optimizer, 0.02)\n",
        STEPS,
    ),
    Mutation(
        "the loss that is shown is this worker's",
        "raycl/training/step.py",
        "value = total / num_workers()",
        "value = loss.item()",
        "tests/workers/test_step.py",
    ),
    Mutation(
        "a loss that is no number is stepped with",
        "raycl/training/step.py",
        "if not math.isfinite(value):",
        "if False:",
        "tests/workers/test_step.py tests/test_training_stores.py tests/cluster/test_run.py",
    ),
    # How views become embeddings
    Mutation(
        "MoCo's keys are made of the query's view",
        "raycl/training/train_state.py",
        "return encode(views.view_b)",
        "return encode(views.view_a)",
        STEPS,
    ),
    Mutation(
        "MoCo's shuffled keys are made of the query's view",
        "raycl/training/train_state.py",
        "return encode_shuffled(encode, views.view_b,",
        "return encode_shuffled(encode, views.view_a,",
        STEPS,
    ),
    Mutation(
        "the same shuffle at every step",
        "raycl/training/train_state.py",
        "views.view_b, seed=self._seed, step=step)",
        "views.view_b, seed=self._seed, step=0)",
        STEPS,
    ),
    Mutation(
        "the same shuffle of both views at every step",
        "raycl/training/train_state.py",
        "rows, seed=self._seed, step=step)",
        "rows, seed=self._seed, step=0)",
        STEPS,
    ),
    Mutation(
        "both halves of a pair are encoded by the tower of queries",
        "raycl/training/train_state.py",
        "keys = self._in_chunks(towers.key_tower, views.keys())",
        "keys = self._in_chunks(towers.query, views.keys())",
        STEPS,
    ),
    Mutation(
        "the learned temperature's gradient is not averaged",
        "raycl/training/train_state.py",
        "            yield from self.temperature.parameters()",
        "            pass",
        "tests/workers",
    ),
    Mutation(
        "the temperature is not kept above its least value",
        "raycl/training/train_state.py",
        "self.temperature.clamp_()",
        "pass",
        STEPS,
    ),
    Mutation(
        "momentum and its complement are exchanged",
        "raycl/models/momentum.py",
        "list(source.parameters()), 1.0 - momentum)",
        "list(source.parameters()), momentum)",
        "tests/test_momentum.py",
    ),
    Mutation(
        "embeddings are not normalized",
        "raycl/models/towers.py",
        "return F.normalize(projected.to(torch.promote_types(projected.dtype, torch.float32)), dim=1)",
        "return projected.to(torch.promote_types(projected.dtype, torch.float32))",
        STEPS,
    ),
    Mutation(
        "biases are decayed",
        "raycl/optim.py",
        '[p for p in parameters if p.ndim <= 1], "weight_decay": 0.0',
        '[p for p in parameters if p.ndim <= 1], "weight_decay": weight_decay',
        "tests/test_optim.py tests/test_plain_steps.py",
    ),
    # Losses over all workers
    Mutation(
        "noise of InstDisc may be the query's own slot",
        "raycl/losses/nce.py",
        "            sample_id=ids.query,\n            noise_id=stored.negative_id,\n        )\n        return add_proximal_term",
        "        )\n        return add_proximal_term",
        STEPS,
    ),
    Mutation(
        "the mass of InstDisc's noise has the query's own slot",
        "raycl/losses/nce.py",
        "                sample_id=ids.query,\n                noise_id=stored.negative_id,\n            )\n            self.normalizer",
        "            )\n            self.normalizer",
        STEPS,
    ),
    Mutation(
        "the shares of hinge and cross-entropy are exchanged",
        "raycl/losses/objective.py",
        "entropy.lerp(self.hinge(query, key, stored, ids), self.hinge_weight)",
        "entropy.lerp(self.hinge(query, key, stored, ids), 1 - self.hinge_weight)",
        STEPS,
    ),
    Mutation(
        "the proximal term is left out",
        "raycl/losses/nce.py",
        "    return loss + weight * proximal_term(query, stored.key)",
        "    return loss",
        STEPS,
    ),
    Mutation(
        "keys of all workers are gathered without gradient",
        "raycl/losses/info_nce.py",
        '"gathered_key": gather(key) if self.in_batch else None',
        '"gathered_key": gather_detached(key) if self.in_batch else None',
        "tests/workers/test_losses.py",
    ),
    Mutation(
        "every worker takes the first rows for its own",
        "raycl/losses/nt_xent.py",
        "            gathered_b=gathered_b,\n            offset=rank() * len(query),",
        "            gathered_b=gathered_b,\n            offset=0,",
        "tests/workers/test_losses.py",
    ),
    Mutation(
        "the log-frequency of keys is not taken off",
        "raycl/losses/clip.py",
        'rows["key_log_frequency"] = self.log_frequency(ids.stored_key)',
        "pass",
        STEPS,
    ),
    Mutation(
        "the log-frequency of explicit negatives is not taken off",
        "raycl/losses/clip.py",
        'rows["negative_log_frequency"] = self.log_frequency(stored.negative_name)',
        "pass",
        STEPS,
    ),
    Mutation(
        "a row of SupCon is its own positive",
        "raycl/losses/supcon.py",
        "weight * (_class_sums(row_label, columns, column_label) - rows)",
        "weight * _class_sums(row_label, columns, column_label)",
        "tests/test_supcon.py",
    ),
    Mutation(
        "unlabeled samples are of one class",
        "raycl/losses/example_ids.py",
        "np.where(label >= 0, label, ~(sample_id & np.iinfo(np.int64).max))",
        "label",
        "tests/test_supcon.py",
    ),
    Mutation(
        "explicit negatives beyond the room of a message are dropped",
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
        "ids of rows with a second name are not made one",
        "raycl/losses/example_ids.py",
        "    return least[component]\n",
        "    return ids\n",
        "tests/test_plain_steps.py tests/test_pairs.py tests/workers/test_pairs.py",
    ),
    Mutation(
        "what the queue lends keeps the names of its rows",
        "raycl/losses/example_ids.py",
        "return torch.where(self.names[place] == name, self.name_ids[place], name)",
        "return name",
        STEPS,
    ),
    # BatchNorm
    Mutation(
        "synchronized BatchNorm takes the mean of the workers' variances",
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
        "shuffled rows are not put back",
        "raycl/batchnorm/shuffled.py",
        "return embeddings.index_select(0, back)",
        "return embeddings[own]",
        STEPS,
    ),
    Mutation(
        "groups of rows are twice as large",
        "raycl/batchnorm/split.py",
        "            layer.group_size = group_size",
        "            layer.group_size = 2 * group_size",
        STEPS,
    ),
    # Negatives
    Mutation(
        "the same noise at every step",
        "raycl/training/stores.py",
        "drawn = self._bank.draw(self._num_negatives, step=step)",
        "drawn = self._bank.draw(self._num_negatives, step=0)",
        STEPS,
    ),
    Mutation(
        "the age of the queue's rows is off by one",
        "raycl/training/stores.py",
        "_ages(self._queue.negatives().step, step + 1)",
        "_ages(self._queue.negatives().step, step)",
        "tests/test_training_stores.py",
    ),
    Mutation(
        "the age of a bank's rows counts those that were never written",
        "raycl/training/stores.py",
        "self._fetched_step[self._fetched_step >= 0]",
        "self._fetched_step",
        "tests/test_training_stores.py",
    ),
    Mutation(
        "the queue keeps the oldest keys of a push that is too large",
        "raycl/negatives/queue.py",
        "kept = Negatives(rows, ids, new.step)[len(rows) - num_kept :]",
        "kept = Negatives(rows, ids, new.step)[:num_kept]",
        "tests/test_stores.py",
    ),
    Mutation(
        "an actor that restarted does not get the keys that it lost",
        "raycl/negatives/client.py",
        "            if answer.sequence < self.queue.sequence:\n",
        "            if False:\n",
        "tests/test_bank_faults.py",
    ),
    Mutation(
        "an actor that dies as it saves leaves a snapshot without its keys",
        "raycl/negatives/client.py",
        "        while incarnation != self._actor.incarnation:\n",
        "        while not incarnation:\n",
        "tests/test_bank_faults.py",
    ),
    Mutation(
        "an update that is sent again is applied again",
        "raycl/negatives/actor.py",
        "            if serial > self._applied.get(client, 0):\n",
        "            if True:\n",
        "tests/test_bank_faults.py tests/test_bank_actor.py",
    ),
    Mutation(
        "shards of an earlier queue are read one after the other",
        "raycl/negatives/snapshot.py",
        "        slots.append(np.arange(len(rows)) * num_shards + shard)\n",
        "        slots.append(np.arange(len(rows)) + 100 * shard)\n",
        "tests/test_bank_actor.py",
    ),
    Mutation(
        "a slot of the memory bank is replaced, not moved",
        "raycl/negatives/memory_bank.py",
        "    mixed *= momentum\n    mixed += (1 - momentum) * directions",
        "    mixed *= 0\n    mixed += directions",
        STEPS,
    ),
    Mutation(
        "the normalizing constant forgets what it was",
        "raycl/losses/nce.py",
        "weights = torch.tensor([self._momentum, 1 - self._momentum]",
        "weights = torch.tensor([0.0, 1.0]",
        STEPS,
    ),
    # Views and their order
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
        "a view depends on the row's place in the batch",
        "raycl/training/transforms.py",
        "drawn = self.augmentation.draw(\n            batch.sample_id,",
        "drawn = self.augmentation.draw(\n            np.arange(len(batch)),",
        "tests/test_views.py",
    ),
    Mutation(
        "every epoch has the same order",
        "raycl/data/sampler.py",
        "rng = np.random.default_rng((self.seed, epoch))",
        "rng = np.random.default_rng((self.seed, 0))",
        "tests/test_order.py",
    ),
    Mutation(
        "every worker has the rows of the first",
        "raycl/data/sampler.py",
        "first = step * share.batch_size + share.rank * share.local_batch_size",
        "first = step * share.batch_size",
        "tests/test_order.py",
    ),
    Mutation(
        "rows that are held out are trained on",
        "raycl/data/split.py",
        '"""Whether each row is a training row."""\n        return _unit_hash(self.seed, sample_id) >= self.test',
        '"""Whether each row is a training row."""\n        return _unit_hash(self.seed, sample_id) >= 0',
        "tests/test_order.py tests/test_data.py tests/test_epochs.py",
    ),
    Mutation(
        "the loop trains on held-out rows",
        "raycl/training/loop.py",
        "train_rows = rows.where(job.holdout.is_train)",
        "train_rows = rows",
        "tests/cluster/test_run.py",
    ),
    Mutation(
        "rows of a batch stay in the order of their tables",
        "raycl/data/in_memory.py",
        "return joined.take(pa.array(np.argsort(order)))",
        "return joined",
        "tests/test_data.py",
    ),
    Mutation(
        "invalid rows of a fragment that is read again count twice",
        "raycl/training/coordinator.py",
        "self._fragments[fragment] = stats",
        "self._fragments[fragment + str(len(self._fragments))] = stats",
        "tests/test_data.py",
    ),
    Mutation(
        "ids of texts are Python's hash, which differs between processes",
        "raycl/data/ids.py",
        'return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)',
        "return hash(content)",
        "tests/test_data.py",
    ),
    # Stages, checkpoints, records
    Mutation(
        "with MIN:MAX workers the batch grows with them",
        "raycl/data/sampler.py",
        "return self.batch_size // self.num_workers",
        "return self.batch_size // 2",
        "tests/test_order.py",
    ),
    Mutation(
        "fewer workers than asked for have a smaller global batch",
        "raycl/training/loop.py",
        "BatchShard(batch_size=stage.batch_size, rank=rank(), num_workers=num_workers())",
        "BatchShard(\n            batch_size=stage.batch_size * num_workers() // self._job.config.workers,\n            rank=rank(),\n            num_workers=num_workers(),\n        )",
        "tests/cluster/test_stages.py tests/cluster/test_run.py tests/cluster/test_survival.py",
    ),
    Mutation(
        "throughput is that of one worker",
        "raycl/training/loop.py",
        "seconds, timing = self._logger.clock.lap(position.samples)\n",
        "seconds, timing = self._logger.clock.lap(position.samples // num_workers())\n",
        "tests/cluster/test_run.py",
    ),
    Mutation(
        "workers may have other numbers of rows",
        "raycl/training/loop.py",
        '        check_equal(len(train_rows), "the number of training rows")\n',
        "",
        "tests/cluster/test_run.py",
    ),
    Mutation(
        "the warm-up is left out",
        "raycl/training/stages.py",
        "warmup = min(round(stage.warmup_epochs * steps_per_epoch), num_steps // 10)",
        "warmup = 0",
        "tests/test_stage_plan.py",
    ),
    Mutation(
        "the learning rate does not follow the batch",
        "raycl/config/stage.py",
        "ratio = self.batch_size / 256",
        "ratio = 1.0",
        "tests/test_config.py tests/test_stage_plan.py",
    ),
    Mutation(
        "a setting without effect is accepted",
        "raycl/config/overrides.py",
        "if not is_default and (problem := why_inactive(config, setting)):",
        "if is_default and (problem := why_inactive(config, setting)):",
        "tests/test_active_settings.py",
    ),
    Mutation(
        "a setting acts although a condition of its section fails",
        "raycl/config/conditions.py",
        "for length in range(1, len(parts) + 1):",
        "for length in range(len(parts), len(parts) + 1):",
        "tests/test_active_settings.py",
    ),
    Mutation(
        "the weight of the hinge does not move",
        "raycl/training/stages.py",
        "hinge_weight=constant(first) if last is None else linear(",
        "hinge_weight=constant(first) if True else linear(",
        "tests/test_stage_plan.py",
    ),
    Mutation(
        "a resumed epoch begins anew",
        "raycl/training/views.py",
        "epoch=epoch, start=start, continues=continues",
        "epoch=epoch, start=0, continues=continues",
        "tests/test_epochs.py",
    ),
    Mutation(
        "the optimizer is not in a checkpoint",
        "raycl/training/train_state.py",
        '            "optimizer": self.optimizer,\n',
        "",
        "tests/test_on_device.py tests/test_training_stores.py tests/cluster/test_run.py",
    ),
    Mutation(
        "a file is written in place",
        "raycl/storage.py",
        'partial = posixpath.join(folder, f".{name}.{uuid.uuid4().hex}") if self.is_local else path',
        "partial = path",
        "tests/test_storage.py",
    ),
    Mutation(
        "the first curve of a report shows another metric",
        "raycl/report/sections.py",
        "[_plot(history[name], PLOTS[name], timeline) for",
        '[_plot(history["samples"], PLOTS[name], timeline) for',
        "tests/test_report.py",
    ),
    Mutation(
        "a row of the README's table of commands is gone",
        "README.md",
        "| `raycl mine` | add an encoder's nearest documents to pairs as hard negatives |\n",
        "",
        "tests/test_docs.py",
    ),
    # Evaluation and measures
    Mutation(
        "kNN votes without weights",
        "raycl/evaluation/knn.py",
        "return _vote(similarity, label, temperature)",
        "return _vote(0 * similarity, label, temperature)",
        "tests/test_knn.py",
    ),
    Mutation(
        "effective rank of centered rows",
        "raycl/evaluation/embedding_metrics.py",
        "exact = _clean(rows).cpu().double()\n",
        "exact = _clean(rows).cpu().double()\n    exact = exact - exact.mean(0)\n",
        "tests/test_embedding_metrics.py",
    ),
    Mutation(
        "recall counts a key of another pair",
        "raycl/training/evaluators.py",
        "is_right = ids[chosen][found] == wanted[:, None]",
        "is_right = chosen[found] == torch.arange(len(wanted))[:, None]",
        "tests/workers/test_pairs.py tests/test_pairs.py tests/test_retrieval_metrics.py",
    ),
    Mutation(
        "a retrieval's own query is a match",
        "raycl/training/evaluators.py",
        "for batch in _batches(test, bank)])",
        "for batch in _batches(test, bank)]).flip(0)",
        "tests/workers/test_pairs.py tests/test_pairs.py",
    ),
]


def main() -> int:
    """Run the tests that should notice each mistake; return 1 if one is not noticed."""
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
    """Make a mistake in a copy of the repository, run its tests, and take the mistake back."""
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
    """Return the text of a file with the mistake in it."""
    assert text.count(mutation.before) == 1, f"{mutation.title}: {text.count(mutation.before)} places found"
    return text.replace(mutation.before, mutation.after)


if __name__ == "__main__":
    sys.exit(main())
