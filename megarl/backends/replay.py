"""An engine that samples nothing: it serves again the rollouts that an earlier run saved.

For debugging and for parity tests of everything after the sampling: same tokens, another layout, loss or algorithm.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megarl.backends.phase import EnginePhase
from megarl.backends.protocols import WeightBucket
from megarl.rollouts import key_text, read, step_path
from megarl.settings import SamplingConfig
from megarl.types import Prompt, Rollout, RolloutKey, Seed


class ReplayEngine:
    """Serves ``run/rollouts/step_*.parquet``; weights that are loaded into it are not looked at."""

    def __init__(self, run: Path) -> None:
        folder = step_path(run, 0).parent
        if not any(folder.glob("step_*.parquet")):
            raise ValueError(f"engine.replay={run}: there are no saved rollouts in {folder}")
        self.run = Path(run)
        self.version = -1
        self._step: int | None = None
        self._saved: dict[RolloutKey, Rollout] = {}
        self._phase = EnginePhase()

    def generate(self, prompts: Sequence[Prompt], seed: Seed, sampling: SamplingConfig) -> list[Rollout]:
        """The saved rollouts of step ``seed.step`` for these prompts, not yet read for answers.

        Their version is that of the weights which sampled them. Raises ValueError where the earlier run sampled no
        such rollout, or sampled it for another prompt text.
        """
        self._phase.check_can_generate()
        self._open(seed.step)
        return [self._serve(prompt, index) for prompt in prompts for index in range(prompt.n)]

    def _open(self, step: int) -> None:
        if self._step == step:
            return
        path = step_path(self.run, step)
        if not path.is_file():
            raise ValueError(f"engine.replay={self.run}: step {step} was not saved ({path} is missing)")
        self._saved = {r.key: r for r in read(path)}
        self._step = step

    def _serve(self, prompt: Prompt, index: int) -> Rollout:
        key = prompt.key(index)
        saved = self._saved.get(key)
        if saved is None:
            raise ValueError(f"engine.replay={self.run}: step {self._step} has no rollout {key_text(key)}")
        if saved.prompt.messages != prompt.messages:
            raise ValueError(
                f"engine.replay={self.run}: rollout {key_text(key)} of step {self._step} answered another prompt text; "
                "replay with the data, view and template of the run that saved it"
            )
        return replace(saved, prompt=prompt, answer=None, well_formed=False)

    def begin_refit(self) -> None:
        self._phase.begin_refit()

    def load_weights(self, bucket: WeightBucket) -> None:
        self._phase.check_refitting()

    def finish_refit(self, version: int) -> None:
        self._phase.check_refitting()
        self._phase.finish_refit()
        self.version = version

    def wake(self) -> None:
        self._phase.wake()

    def sleep(self) -> None:
        self._phase.sleep()

    def close(self) -> None:
        self._saved = {}
        self._step = None
