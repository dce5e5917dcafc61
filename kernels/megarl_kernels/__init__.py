"""Numerical kernels of policy-gradient training on language models; needs torch and nothing else."""

from megarl_kernels.advantage import grouped_advantage
from megarl_kernels.logprob import LogprobOutput, vocab_parallel_logprob
from megarl_kernels.token_loss import grpo_token_loss

__all__ = ["LogprobOutput", "grouped_advantage", "grpo_token_loss", "vocab_parallel_logprob"]
