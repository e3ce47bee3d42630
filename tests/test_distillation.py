"""The loss of a student and its teacher; tests/workers/test_objectives.py compares it with the plain formula."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raycl.config.overrides import override
from raycl.errors import ConfigError
from raycl.losses import distillation
from raycl.losses.guide import Guide
from raycl.recipes import recipe
from raycl.step_replay.record import read_record
from raycl.step_replay.restore import coming_views
from raycl.step_replay.rows import read_rows
from raycl.training import step_runner
from raycl.training.data_module import check_width
from raycl.training.guide import read_guide
from raycl.training.step_runner import StepRunner
from tests.embeddings import make_rows, make_views
from tests.gradients import assert_close, leaves, value_and_gradients
from tests.images import write_digits
from tests.plain_losses import plain_distillation
from tests.recorded_runs import record_run, small_config

QUERY, KEY = make_views(40, 6)


def test_a_student_as_near_as_its_teacher_has_no_gradient() -> None:
    query, key = leaves(QUERY, KEY, dtype=torch.float64)
    teacher = Guide.of(QUERY.double(), KEY.double())
    _, *gradients = value_and_gradients(
        distillation(query, key, teacher, temperature=0.2, teacher_temperature=0.2), [query, key]
    )
    assert max(float(each.abs().max()) for each in gradients) < 1e-12


def test_the_learned_temperature_has_the_gradient_of_the_formula() -> None:
    teacher, temperature = make_views(40, 9, seed=3), torch.tensor(0.3)
    inputs = query, key, heat = leaves(QUERY, KEY, temperature, dtype=torch.float64)
    value = distillation(query, key, Guide.of(*teacher), temperature=heat, teacher_temperature=0.1)
    plain = plain_distillation(query, key, heat, teacher, teacher_temperature=0.1)
    assert_close(value_and_gradients(value, inputs), value_and_gradients(plain, inputs), 1e-7)


def test_the_teachers_embeddings_as_keys_have_the_gradient_of_the_formula() -> None:
    teacher, inputs = make_views(40, 6, seed=3), leaves(QUERY, KEY, torch.tensor(0.3), dtype=torch.float64)
    settings: dict[str, Any] = {"teacher_temperature": 0.1, "teacher_keys": True}
    value = distillation(*inputs[:2], Guide.of(*teacher), temperature=inputs[2], **settings)
    plain = plain_distillation(*inputs, teacher, **settings)
    assert_close(value_and_gradients(value, inputs), value_and_gradients(plain, inputs), 1e-7)


def test_half_precision_of_the_student_and_its_teacher_is_computed_in_float32() -> None:
    teacher = make_views(40, 9, seed=3)
    settings: dict[str, Any] = {"temperature": 0.1, "teacher_temperature": 0.1}
    half = distillation(QUERY.half(), KEY.half(), Guide.of(*(each.half() for each in teacher)), **settings)
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(
        distillation(QUERY, KEY, Guide.of(*teacher), **settings).item(), rel=1e-2
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_temperature": 0.0}, "the teacher's temperature must be above 0, got 0; give 0.1"),
        ({"temperature": -1.0}, "the temperature must be above 0, got -1"),
        ({"teacher": Guide.of(QUERY[:3], KEY[:3])}, "the guide has 3 queries, 3 keys and 0 negatives"),
        ({"offset": 1}, "this worker's rows lie outside the gathered rows"),
        (
            {"teacher": Guide.of(*make_views(40, 9)), "teacher_keys": True},
            "the student has 6 numbers and the teacher 9; give the student the teacher's width",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {"teacher": Guide.of(QUERY, KEY), "temperature": 0.1, "teacher_temperature": 0.1} | changes
    with pytest.raises(ConfigError, match=message):
        distillation(QUERY, KEY, **arguments)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("simcse", {}, "distillation needs the embeddings of a teacher; set negatives.guide.query$"),
        (
            "two_tower",
            {"negatives.explicit": False},
            "set negatives.guide.query and negatives.guide.document$",
        ),
        ("clip", {}, "needs negatives.guide, which data.kind image_text cannot have; set another loss"),
        ("moco_v2", {"negatives.guide.query": "teacher"}, "distillation is incompatible with key momentum_encoder"),
        (
            "simcse",
            {"negatives.guide.query": "teacher", "negatives.guide.margin": 0.1},
            "guide.margin acts only with a stage with another loss than distillation",
        ),
    ],
)  # fmt: skip
def test_a_run_without_a_fitting_teacher_is_refused(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        override(recipe(name, image_size=32), {"stages.0.loss": "distillation", **settings})


def test_a_teacher_of_another_width_and_prefixes_are_refused() -> None:
    settings = {
        "negatives.guide.query": "teacher",
        "stages.0.loss": "distillation",
        "stages.0.teacher_keys": True,
    }
    config = override(recipe("simcse"), settings)
    check_width(config, 256)
    with pytest.raises(ConfigError, match="has 256 numbers and its teacher 384; set projection_head.dim=384"):
        check_width(config, 384)
    with pytest.raises(ConfigError, match="teacher_keys compares whole embeddings"):
        override(config, {"stages.0.matryoshka_dims": [64]})


@pytest.mark.parametrize("changes", [{"loss": "nt_xent"}, {"loss": "info_nce", "hinge_weight": 0.5}])
def test_a_teacher_that_would_mask_another_stage_is_refused_with_a_working_remedy(
    changes: dict[str, Any],
) -> None:
    settings = {"negatives.guide.query": "teacher", "stages.0.loss": "distillation"}
    settings |= {f"stages.1.{name}": value for name, value in changes.items()}
    with pytest.raises(ConfigError, match="negatives.guide.* or negatives.guide.margin to 0$"):
        override(recipe("simcse"), settings | {"negatives.guide.margin": 0.1})
    override(recipe("simcse"), settings)


@pytest.mark.parametrize("loss", ["info_nce", "nt_xent", "hinge"])
def test_a_stage_after_a_distillation_has_the_loss_of_a_run_without_a_teacher(
    loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = {"stages.0.loss": "info_nce", "stages.0.steps": 2, "stages.1.loss": loss, "stages.1.steps": 2}
    data = write_digits(tmp_path / "digits.parquet", 80)
    alone = read_rows(
        read_record(str(record_run(small_config("simclr", stages), data, tmp_path / "run")))
    ).job
    ids, teacher = np.arange(80), tmp_path / "teacher"
    teacher.mkdir()
    vectors = {"sample_id": ids, "representation": make_rows(80, 5).tolist()}
    pq.write_table(pa.table(vectors), teacher / "rows.parquet")
    learning = {"stages.0.loss": "distillation", "negatives.guide.query": str(teacher)}
    config = override(alone.config, learning)
    tables: Any = read_guide(config.negatives.guide, [pa.table({"sample_id": ids})], [])
    monkeypatch.setattr(step_runner.ray, "get", lambda reference: reference)
    device = torch.device("cpu")
    student = StepRunner(replace(alone, config=config, guide=tables), None, device)
    views = coming_views(student)
    assert [student.step(next(views), is_watched=True).guided is not None for _ in range(2)] == [True, True]

    coming = next(views)
    runner = StepRunner(alone, None, device)
    runner.state.load_state_dict(student.state.state_dict())
    runner.position = student.position
    found, expected = (
        each.step(of_stage, is_watched=True)
        for each, of_stage in ((student, coming), (runner, next(runner.views())))
    )
    assert found.loss == expected.loss
    assert found.collapsed_loss == expected.collapsed_loss is not None
    assert found.guided is None


def test_a_teacher_may_mask_negatives_in_another_stage() -> None:
    config = override(
        recipe("simcse"),
        {
            "negatives.guide.query": "teacher",
            "negatives.guide.margin": 0.1,
            "stages.0.loss": "distillation",
            "stages.1.loss": "info_nce",
        },
    )
    assert [stage.loss for stage in config.stages] == ["distillation", "info_nce"]
