"""What an engine in this process may be asked next."""


class EnginePhase:
    """Born awake without weights; anything out of order raises RuntimeError.

    A refit (begin, weights, finish) gives it weights, awake or asleep, and one that failed is begun anew. ``sleep``
    gives the weights up, so that a refit comes before the next ``wake``: on a GPU they would be gone.
    """

    def __init__(self) -> None:
        self._fitted = False
        self._refitting = False
        self._asleep = False

    def begin_refit(self) -> None:
        self._fitted = False
        self._refitting = True

    def check_refitting(self) -> None:
        self._require(self._refitting, "weights come between begin_refit and finish_refit")

    def finish_refit(self) -> None:
        self._refitting = False
        self._fitted = True

    def wake(self) -> None:
        self._require(not self._refitting, "wake in the middle of a refit")
        self._require(self._fitted or not self._asleep, "wake without weights: sleeping gave them up, refit first")
        self._asleep = False

    def sleep(self) -> None:
        self._require(not self._refitting, "sleep in the middle of a refit")
        self._asleep = True
        self._fitted = False

    def check_can_generate(self) -> None:
        self._require(not self._refitting, "generate in the middle of a refit")
        self._require(self._fitted, "generate without weights: a refit comes first")
        self._require(not self._asleep, "generate while asleep: wake it first")

    def _require(self, condition: bool, broken: str) -> None:
        if not condition:
            raise RuntimeError(f"engine: {broken}")
