"""`megarl demo`: the main job in miniature, on any laptop; and a real model for the next step (`smollm2`)."""

from collections.abc import Sequence


def main(args: Sequence[str]) -> None:
    """Run the demo command; see ``megarl.demo.command``."""
    from megarl.demo.command import run  # here: megarl.demo.smollm2 needs neither Ray nor Megatron

    run(args)
