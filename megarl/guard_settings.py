"""The section of a run's configuration that says when the run is unhealthy. No torch, no I/O."""

from typing import Literal

from pydantic import Field, model_validator

from megarl.settings import Section


class TurnConfig(Section):
    """What is a sign of collapse in one metric, smoothed: a rise and then a fall, or leaving its bounds."""

    rise: float = Field(default=0.2, ge=0, description="from the lowest value before the peak, as a share of the peak")
    fall: float = Field(default=0.2, gt=0, le=1, description="from the peak to now, as a share of the peak")
    least: float | None = Field(default=None, description="below it is a sign by itself; null: no such bound")
    most: float | None = Field(default=None, description="above it is a sign by itself; null: no such bound")


class GuardConfig(Section):
    """When a run is unhealthy. Drift is mean |logprob by engine - by policy| over a step's response tokens.

    Signs of collapse need no true answers and are no proof: a rewards' spread also falls where everybody is right.
    """

    drift_float32: float = Field(default=1e-4, gt=0, description="most drift of an agent in float32, in nats")
    drift_bfloat16: float = Field(default=6e-2, gt=0, description="most drift of an agent in bfloat16, in nats")
    on_drift: Literal["stop", "warn"] = Field(default="stop", description="stop: exit code 3, before the update")
    skipped_in_a_row: int = Field(
        default=3, ge=1, description="steps with a gradient that is not finite, one after the other, before a stop"
    )
    on_collapse: Literal["stop", "warn", "off"] = Field(
        default="warn", description="a sign of collapse; stop: exit code 3, before the update"
    )
    window: int = Field(default=40, ge=3, description="steps that are looked back upon, the present one included")
    smooth: int = Field(default=5, ge=1, description="steps of the running mean that is judged instead of a metric")
    vote_margin: TurnConfig | None = Field(
        default=TurnConfig(), description="watches agent/X/label/vote_margin; null: not watched"
    )
    entropy: TurnConfig | None = Field(
        default=TurnConfig(), description="watches agent/X/policy/entropy; null: not watched"
    )
    response_tokens: TurnConfig | None = Field(
        default=TurnConfig(), description="watches agent/X/engine/response_tokens; null: not watched"
    )
    reward_spread: TurnConfig | None = Field(
        default=TurnConfig(), description="watches agent/X/reward/reward_spread; null: not watched"
    )

    @model_validator(mode="after")
    def _window_holds_a_turn(self) -> "GuardConfig":
        if self.window < self.smooth + 2:
            raise ValueError(
                f"guard.window={self.window} is too short for guard.smooth={self.smooth}: a turn takes three smoothed "
                f"values, so at least {self.smooth + 2} steps"
            )
        return self
