"""Chat completions of an OpenAI-compatible server: many requests at once, each reply as it comes."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager

from megarl.settings import SamplingConfig
from megarl.views import Reply

_RETRIES = 5  # of a request that was refused for load or lost on the way, with growing pauses


@contextmanager
def open_endpoint(
    url: str,
    key: str,
    model: str,
    sampling: SamplingConfig,
    seed: int | None,
    *,
    workers: int,
    timeout_s: float,
) -> Iterator[Callable[[Mapping[str, str], int], Iterator[tuple[str, Reply]]]]:
    """``ask(id -> request, attempt)`` yields (id, reply) in the order in which replies arrive.

    A request that the server calls bad is a reply with a fault. Raises ValueError where the server will take none
    (address, model or key are wrong), ConnectionError where it cannot be reached, though asked again.
    """
    import openai  # a second; the other verbs do without
    from openai.types.chat import ChatCompletion

    client = openai.OpenAI(base_url=url, api_key=key, timeout=timeout_s, max_retries=_RETRIES)

    def reply(text: str, attempt: int) -> Reply:
        try:
            answer = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": text}],
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_tokens,
                seed=openai.omit if seed is None else seed + attempt,
            )
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            return Reply(fault=f"bad request: {_short(error)}")
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            raise ValueError(f"--endpoint {url}, --model {model}: {_short(error)}") from error
        except openai.APIError as error:
            raise ConnectionError(f"--endpoint {url}: {_short(error)}") from error
        if not isinstance(answer, ChatCompletion) or not answer.choices:
            raise ValueError(f"--endpoint {url} answers, but with no chat completion: is it the address up to /v1?")
        choice = answer.choices[0]
        return Reply(text=choice.message.content or "", complete=choice.finish_reason == "stop")

    def ask(requests: Mapping[str, str], attempt: int) -> Iterator[tuple[str, Reply]]:
        pool = ThreadPoolExecutor(max_workers=workers)
        try:
            running = {pool.submit(reply, text, attempt): uid for uid, text in requests.items()}
            for future in as_completed(running):
                yield running[future], future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    with client:
        yield ask


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."
