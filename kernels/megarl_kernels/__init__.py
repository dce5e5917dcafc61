"""Numerical kernels of policy-gradient training on language models; needs torch and numpy and nothing else."""

from megarl_kernels.advantage import grouped_advantage
from megarl_kernels.head import linear_logprob
from megarl_kernels.logprob import vocab_parallel_logprob
from megarl_kernels.moments import LogprobOutput
from megarl_kernels.token_loss import grpo_token_loss

__all__ = ["LogprobOutput", "grouped_advantage", "grpo_token_loss", "linear_logprob", "vocab_parallel_logprob"]
