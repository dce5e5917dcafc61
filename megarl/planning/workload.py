"""What a run asks of each agent in one step, from its configuration and a few expectations that no file can hold."""

from dataclasses import dataclass

from megarl.algos.coverrl import CoVerRL
from megarl.config import RunConfig
from megarl.planning.lengths import Lengths
from megarl.planning.steptime import Turn, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectations:
    """What the planner must be told about the data, or assumes. Tokens are means."""

    prompt_tokens: float | None = None  # of a question; None: 128, or half of a smaller limit
    response_share: float = 0.35  # of max_tokens; published math runs have 0.1 to 0.8
    spread: float = 0.7  # sigma of the logarithm of the response's length
    verified_share: float = 0.7  # CoVerRL: questions that get verdicts
    wrong_share: float = 0.5  # CoVerRL: verdicts that ask for revisions
    verdict_share: float = 0.5  # CoVerRL: length of a verdict against that of an answer

    def question(self, cfg: RunConfig) -> float:
        return self.prompt_tokens or min(128.0, cfg.data.max_prompt_tokens / 2)


def workload(cfg: RunConfig, agent: str, expect: Expectations) -> Workload:
    """One step of an agent: its turns of rollouts, logprob passes and optimizer steps."""
    batch, seats = cfg.batch, len(cfg.agents[agent].seated(agent))
    questions, samples = batch.prompts_per_step * seats, cfg.samples(agent)
    limit = float(cfg.sampling_of(agent).max_tokens)
    lengths = Lengths(expect.response_share * limit, limit, expect.spread)
    prompt = expect.question(cfg)
    turns = [Turn(samples=questions * samples, distinct_prompts=questions, prompt_tokens=prompt, lengths=lengths)]
    trained = questions * min(samples, batch.train_samples_per_prompt or samples)
    if isinstance(cfg.algo, CoVerRL):
        turns += _later_turns(cfg.algo, questions, prompt, lengths, expect)
        trained += sum(turn.samples for turn in turns[1:])
    return Workload(
        turns=tuple(turns),
        trained_share=trained / sum(turn.samples for turn in turns),
        updates=batch.updates(trained),
        passes=1 + (cfg.kl_coef(agent) > 0),
    )


def _later_turns(algo: CoVerRL, questions: int, prompt: float, answer: Lengths, expect: Expectations) -> list[Turn]:
    """Verdicts on M answers that agree and on as many copies of one that does not, then revisions."""
    verdict = Lengths(expect.verdict_share * answer.mean, answer.limit, answer.spread)
    asked = max(1, round(questions * expect.verified_share))
    verdicts = asked * (algo.positives + (algo.negative_samples or algo.positives))
    turns = [
        Turn(
            samples=verdicts,
            distinct_prompts=asked * (algo.positives + 1),
            prompt_tokens=prompt + answer.mean,
            lengths=verdict,
        )
    ]
    wrong = round(verdicts * expect.wrong_share)
    if algo.revisions and wrong:
        turns.append(
            Turn(
                samples=wrong * algo.revisions,
                distinct_prompts=wrong,
                prompt_tokens=prompt + answer.mean + verdict.mean,
                lengths=answer,
            )
        )
    return turns
