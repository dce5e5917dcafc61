"""megarl: label-free reinforcement learning of several language models in one Megatron job."""

__version__ = "0.1.0"
