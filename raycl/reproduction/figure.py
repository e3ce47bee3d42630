"""A figure: which runs it takes, what it claims, and how it is drawn. Plain data and two functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from matplotlib.figure import Figure as Picture

from raycl.config import RunConfig
from raycl.config.overrides import override
from raycl.errors import ConfigError
from raycl.recipes import recipe
from raycl.reproduction.claims import Claim
from raycl.reproduction.outcomes import Results
from raycl.reproduction.scales import SCALES, ScaleName


@final
@dataclass(frozen=True, kw_only=True)
class Setting:
    """One thing that a figure compares: a recipe, and what it changes of it.

    ``name`` is for folders, ``label`` for people. ``line`` is the curve that the setting is a point
    of, at ``x``, where a figure has curves of that kind.
    """

    name: str
    label: str
    recipe: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    line: str | None = None
    x: float | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Figure:
    """A claim of the field: ``settings`` and what all of them ``share``, by scale.

    ``columns`` are the measured numbers of the table, by key of an outcome. ``probes_leakage`` asks for
    the probe of BatchNorm's leak on the test images, in groups of so many rows.
    """

    name: str
    title: str
    source: str
    settings: Mapping[ScaleName, tuple[Setting, ...]]
    shared: Mapping[ScaleName, Mapping[str, Any]]
    columns: Mapping[str, str]
    claims: Callable[[Results], list[Claim]]
    draw: Callable[[Results, Picture], None]
    note: str = ""
    probes_leakage: Mapping[ScaleName, int] = field(default_factory=dict)

    def config(
        self,
        setting: Setting,
        scale: ScaleName,
        *,
        seed: int,
        workers: int | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> RunConfig:
        """Return the run of a setting: the scale, the figure, the setting, then the user's ``overrides``.

        ``workers`` are those of settings that do not state their own. Raises ``ConfigError``.
        """
        overrides = overrides or {}
        if "seed" in overrides:
            raise ConfigError(
                f"--set seed={overrides['seed']} would make all seeds of a setting one and the same run; leave it "
                "out, --seeds says how many there are"
            )
        size = SCALES[scale].image_size
        asked = {} if workers is None else {"workers": workers}
        stated = {**SCALES[scale].overrides, **self.shared[scale], **asked, **setting.overrides, "seed": seed}
        # Twice: a stage that the table adds is a copy of what the table says, not of what the user does.
        return override(override(recipe(setting.recipe, image_size=size), stated), overrides)
