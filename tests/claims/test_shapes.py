"""Each shape of a claim, there and back, by a real process on a simulated host."""

import pytest

from agent.simulate.host import arc_b50
from tests.claims.conftest import MakeHost
from tests.claims.shapes import B50, SHAPES, VF, Shape

pytestmark = pytest.mark.claims


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_prepared_and_released_each_twice(make_host: MakeHost, shape: Shape) -> None:
    with shape.make(make_host) as host:
        shape.start(host)
        before = host.world()
        for _ in range(2):
            answers = [shape.prepare(host) for _ in range(2)]
            assert [answer["problems"] for answer in answers] == [[], []]
            assert [tuple(answer["names"]) for answer in answers] == [shape.names] * 2
            held = host.world()
            for address, driver in shape.moves.items():
                assert held["functions"].pop(address)[0] == driver
            others = {a: f for a, f in before["functions"].items() if a not in shape.moves}
            assert held["functions"] == others
            for name in shape.names:
                kind, _, device = name.partition("=")
                assert device in held["published"][kind]
            assert [host.release("vm")["problems"] for _ in range(2)] == [[], []]
            assert host.world() == before
        assert host.stop() == 0


def test_a_pf_with_vfs_is_refused_and_its_vfs_stay(make_host: MakeHost) -> None:
    with make_host(*arc_b50()) as host:
        host.kernel.create_vfs(B50, 2)
        host.start()
        before = host.world()
        for _ in range(2):
            assert host.prepare("vm", B50)["problems"][0]["code"] == "active-vfs"
        assert host.world() == before
        host.reader.patience = 8
        host.kernel.remove_vfs(B50)
        host.until(lambda: host.ask("GET", f"/v1/explain/{VF}").get("ok") is False)
        assert host.prepare("vm", B50)["ok"]
