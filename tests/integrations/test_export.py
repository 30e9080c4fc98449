"""`shmcache export` as a process: what it serves, to whom, how it ends; its page in a browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import pytest
from click.testing import CliRunner

import shmcache as sc
from shmcache.cli.main import main
from tests.support import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMITS = sc.CachePoolLimits(1 << 20, 4 << 20, 1 << 20, 0)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture
def pool(pool_name: str) -> Iterator[sc.CacheResidencyPool]:
    with sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=4 << 20) as made:
        made.allocate(100).publish(bytes(32))
        yield made


@contextlib.contextmanager
def exporting(*names: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and the URL it serves."""
    command = [sys.executable, "-m", "shmcache.cli.main", "export", *names, "--json"]
    with subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            assert (list(said), said["pools"]) == (["event", "url", "pools"], list(names))
            yield process, said["url"]
        finally:
            process.kill()


def get(url: str, path: str, host: str | None = None, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_it_serves_what_the_pool_says(pool: sc.CacheResidencyPool) -> None:
    with exporting(pool.name) as (process, url):
        status, body = get(url, f"/api/pools/{pool.name}")
        served, own = msgspec.json.decode(body, type=sc.PoolSnapshot), pool.snapshot()
        assert status == 200
        assert msgspec.structs.replace(served, taken_ns=own.taken_ns) == msgspec.structs.replace(
            own, owners=served.owners
        )
        assert [row.pid for row in served.owners] == [row.pid for row in own.owners]
        metrics = get(url, "/metrics")[1].decode()
        assert f'shmcache_up{{pool="{pool.name}"}} 1.0' in metrics
        pools = json.loads(get(url, "/api/pools")[1])["pools"]
        assert pools == [{"name": pool.name, "state": "active", "message": ""}]
        assert get(url, "/")[1].startswith(b"<!doctype html>")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_it_follows_a_pool_that_goes_and_comes(pool: sc.CacheResidencyPool) -> None:
    with exporting(pool.name) as (process, url):
        before = json.loads(get(url, f"/api/pools/{pool.name}")[1])["pool_id"]
        sc.CacheResidencyPool.destroy(pool.name, force=True)
        status, body = get(url, f"/api/pools/{pool.name}")
        assert (status, json.loads(body)["state"]) == (503, "absent")
        assert f'shmcache_up{{pool="{pool.name}"}} 0.0' in get(url, "/metrics")[1].decode()
        with sc.CacheResidencyPool.create(pool.name, LIMITS, arena_bytes=0):
            after = json.loads(get(url, f"/api/pools/{pool.name}")[1])["pool_id"]
        assert after != before
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_only_what_was_asked_for_and_only_for_this_host(pool: sc.CacheResidencyPool) -> None:
    with exporting(pool.name) as (_, url):
        port = urlsplit(url).port
        assert get(url, "/metrics", host="stranger.example")[0] == 403
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
            assert get(url, "/metrics", host=host)[0] == 200
        for path in ("/api/pools/other", "/api/pools/..%2f..%2fetc", "/etc/passwd", "/%ff"):
            assert get(url, path)[0] == 404
        assert get(url, "/metrics", method="POST")[0] == 501


def test_nothing_but_numbers_is_listened_on() -> None:
    """A name would have to be looked up, and an address that is forgotten must not mean all."""
    for listen in ("localhost:1", ":9469", "9469", "127.0.0.1:99999", "0.0.0.0"):
        result = CliRunner().invoke(main, ["export", "--listen", listen])
        assert result.exit_code == 2, listen
    (option,) = (o for o in main.commands["export"].params if o.name == "listen")
    assert str(option.default).startswith("127.0.0.1:")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_a_browser_draws_the_page(pool: sc.CacheResidencyPool, tmp_path: Path) -> None:
    """The script runs under the page's own policy, and shows owners, also the dead as dead."""
    with Worker("import shmcache as sc") as worker, exporting(pool.name) as (_, url):
        worker.call("pool = sc.CacheResidencyPool.attach(name)\npool.report()", name=pool.name)
        worker.kill()
        page = browser(url, "--dump-dom", tmp_path)
        assert '<span id="state" class="state active">active</span>' in page
        assert f"<td>{worker.pid}</td>" in page.replace(' class=""', "")
        assert page.count('class="left state dead"') == page.count('class="left state alive"') == 1
        assert "slabs in use" in page
        picture = tmp_path / "page.png"
        browser(url, f"--screenshot={picture}", tmp_path)
        assert len(picture.read_bytes()) > 20_000  # an empty page has a few thousand
        sc.CacheResidencyPool.destroy(pool.name, force=True)
        assert 'class="state absent">absent' in browser(url, "--dump-dom", tmp_path)


def browser(url: str, what: str, folder: Path) -> Any:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,1100"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=4000", what]
    done = subprocess.run([*command, f"{url}/"], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout
