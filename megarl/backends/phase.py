"""What an engine may be asked next."""


class EnginePhase:
    """Refit first, then generate while awake; anything out of order raises RuntimeError.

    A refit may come at any time, also to a sleeping engine; one that failed must be begun again.
    """

    def __init__(self) -> None:
        self._fitted = False
        self._refitting = False
        self._awake = True

    def begin_refit(self) -> None:
        self._refitting = True

    def check_refitting(self) -> None:
        if not self._refitting:
            raise RuntimeError("weights come between begin_refit and finish_refit")

    def finish_refit(self) -> None:
        self._refitting = False
        self._fitted = True

    def wake(self) -> None:
        self._awake = True

    def sleep(self) -> None:
        self._awake = False

    def check_can_generate(self) -> None:
        if not self._fitted or self._refitting:
            raise RuntimeError("the engine has no complete weights: finish a refit before generating")
        if not self._awake:
            raise RuntimeError("the engine sleeps: wake it before generating")
