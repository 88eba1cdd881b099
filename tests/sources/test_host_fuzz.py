"""Any files that a host may have: nothing is raised, no limit is invented, none is dropped without a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpurt.sources import host
from gpurt.sources.host_files import parse_cpu_list
from gpurt.sources.sysfs import parse_number

EXAMPLES = pytest.mark.parametrize("examples", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
GIB = 1 << 30
HOST = 64 * GIB

GROUPS = ["", "a", "a/b", "docker/x", "docker/x/a"]
PLACES = ["sys/fs/cgroup", "sys/fs/cgroup/unified", "sys/fs/cgroup/memory", "sys/fs/cgroup/cpu", "mnt/c"]

junk = st.text(max_size=12) | st.sampled_from(["", "\0", "-", "max max", "0x", "1_0", "\N{ARABIC-INDIC DIGIT FIVE}"])
sizes = st.integers(0, 2 * HOST).map(str) | st.sampled_from(
    ["max", "-1", "0", "9223372036854771712", "18446744073709551615"]
)
cpus = st.sampled_from(["0", "0-3", "1,3-5", "", "0-8191", "0-99999999999", "3-1", "a"]) | junk
FILES = {
    "memory.max": sizes | junk,
    "memory.limit_in_bytes": sizes | junk,
    "memory.current": sizes | junk,
    "memory.usage_in_bytes": sizes | junk,
    "memory.stat": st.builds(
        lambda a, b: f"anon 1\ninactive_file {a}\ntotal_inactive_file {a}\nhierarchical_memory_limit {b}\n",
        sizes | junk, sizes | junk,
    ) | junk,
    "cpu.max": st.builds(lambda a, b: f"{a} {b}", st.sampled_from(["max", "50000", "200000", "0", "-1"]) | junk,
                         st.sampled_from(["100000", "0", ""]) | junk) | junk,
    "cpu.cfs_quota_us": st.sampled_from(["-1", "150000", "0"]) | junk,
    "cpu.cfs_period_us": st.sampled_from(["100000", "0"]) | junk,
    "cpuset.cpus.effective": cpus,
    "cpuset.cpus": cpus,
}  # fmt: skip

own = st.sampled_from(["/", "/a", "/a/b", "/docker/x", "/docker/x/a", "/../..", "/gone"])
controllers = st.sampled_from(["0:", "4:memory", "3:cpu,cpuacct", "2:cpuset", "1:name=x"])
lines = st.builds(lambda numbered, path: f"{numbered}:{path}", controllers, own)
mount = st.builds(
    lambda top, point, kind: f"31 25 0:26 {top} /{point} rw shared:9 - {kind} x rw,memory,cpu,cpuset",
    st.sampled_from(["/", "/docker/x", "/a", "/../.."]),
    st.sampled_from(PLACES),
    st.sampled_from(["cgroup", "cgroup2"]),
)
directories = st.builds("{}/{}".format, st.sampled_from(PLACES), st.sampled_from(GROUPS))
one_file = st.one_of(
    [st.tuples(directories.map(f"{{}}/{name}".format), st.none() | texts) for name, texts in FILES.items()]
)
limits = st.lists(one_file, max_size=7).map(lambda found: {path.replace("//", "/"): text for path, text in found})
around = st.fixed_dictionaries(
    {
        "proc/self/cgroup": st.lists(lines | lines | lines | junk, max_size=4).map("\n".join),
        "proc/self/mountinfo": st.lists(mount | mount | junk, max_size=3).map("\n".join),
        "proc/self/status": cpus.map("Cpus_allowed_list:\t{}\n".format),
        "sys/devices/system/cpu/online": cpus,
    }
)
MEMINFO = f"MemTotal: {HOST >> 10} kB\nMemAvailable: {HOST >> 11} kB\n"

Tree = dict[str, str | None]


class Files:
    """Files in memory, in place of three functions: writing real ones takes ten times as long as reading them.
    None is a file that may not be read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.tree: Tree = {}
        for name in ("read", "listed", "is_directory"):
            patch.setattr(f"gpurt.sources.host_files.{name}", getattr(self, name))

    def read(self, path: Path) -> tuple[str | None, str | None]:
        text = self.tree.get(self._name(path), "no such file")
        if text is None:
            return None, "no_permission"
        if text == "no such file":
            return None, "error" if self.is_directory(path) else "unsupported"
        return text.strip("\0 \t\r\n"), None

    def listed(self, directory: Path) -> tuple[list[str], str | None]:
        start = f"{self._name(directory)}/"
        names = {name[len(start) :].split("/")[0] for name in self.tree if name.startswith(start)}
        return sorted(names), None if names else "unsupported"

    def is_directory(self, path: Path) -> bool:
        name = self._name(path)
        return any(known.startswith(f"{name}/") for known in self.tree)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(ROOT))


ROOT = Path("/host")


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    return Files(monkeypatch)


@EXAMPLES
def test_any_control_groups(examples: int, files: Files) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(limits, around)
    def check(written: Tree, rest: Tree) -> None:
        files.tree = {"proc/meminfo": MEMINFO, **written, **rest}
        memory = host.memory_budget(ROOT)
        texts = [text for text in written.values() if text is not None]
        numbers = {parse_number(word) for text in texts for word in (*text.split(), text.strip("\0 \t\r\n"))}
        assert memory.total_bytes == HOST or memory.total_bytes in numbers
        assert 0 <= memory.usable_bytes <= min(memory.total_bytes, memory.available_bytes)
        assert memory.available_bytes <= HOST // 2
        assert memory.source in ("meminfo", "cgroup")

        budget = host.cpu_budget(ROOT)
        assert 1 <= budget.count <= budget.allowed
        assert budget.quota is None or budget.quota > 0
        allowed = parse_cpu_list((rest["proc/self/status"] or "").split("\t", 1)[1])
        if budget.source in ("affinity", "cpuset") and allowed:
            assert budget.count <= len(allowed)

        skipped = (*memory.skipped, *budget.skipped)
        assert all(item.why for item in skipped)
        assert {item.where for item in skipped} <= set(files.tree)

    check()


@EXAMPLES
def test_limits_of_the_own_groups_are_counted_or_said(examples: int, files: Files) -> None:
    levels = [f"sys/fs/cgroup/{group}memory.max" for group in ("", "a/", "a/b/")]

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.none() | sizes | junk, min_size=3, max_size=3))
    def check(texts: list[str | None]) -> None:
        expected, unclear = HOST // 2, 0
        for text in texts:
            bare = None if text is None else text.strip("\0 \t\r\n")
            value = None if bare is None else parse_number(bare)
            if value is not None and value >= 0:
                expected = min(expected, value)
            elif bare not in ("", "max") and value != -1:
                unclear += 1
        written = dict(zip(levels, texts, strict=True))
        files.tree = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b\n", **written}
        memory = host.memory_budget(ROOT)
        assert memory.usable_bytes == expected
        assert len(memory.skipped) == unclear

    check()


nodes = st.dictionaries(
    st.integers(0, 3),
    st.fixed_dictionaries(
        {},
        optional={
            "cpulist": cpus,
            "meminfo": st.builds(
                lambda a, b: f"Node 0 MemTotal: {a}\nNode 0 MemFree: {b}\n",
                st.sampled_from(["8 kB", "96 kB", "-1 kB", "x kB", "8"]), st.sampled_from(["8 kB", "9 kB", ""]),
            ) | junk,
            "distance": st.sampled_from(["10 20", "10", "x", "-1"]) | junk,
        },
    ),
    max_size=3,
)  # fmt: skip
cpuinfo = (
    st.lists(
        st.builds(
            lambda key, value: f"{key}\t: {value}",
            st.sampled_from(
                [
                    "processor",
                    "vendor_id",
                    "model name",
                    "flags",
                    "Features",
                    "CPU implementer",
                    "CPU part",
                    "isa",
                    "cpu",
                ]
            ),
            st.sampled_from(
                ["0", "GenuineIntel", "lm avx2", "asimd", "0x41", "0xd4f", "rv64imac_zba", "rv64", "POWER9"]
            )
            | junk,
        )
        | junk,
        max_size=6,
    ).map("\n".join)
    | junk
)
pools = st.dictionaries(
    st.sampled_from(["hugepages-2048kB", "hugepages-kB", "hugepages-0kB", "hugepages-1048576kB"]),
    sizes | junk,
    max_size=3,
)


@EXAMPLES
def test_any_nodes_pages_and_processors(examples: int, files: Files) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(nodes, cpuinfo, pools, st.sampled_from(["always [madvise] never", "[always]", ""]) | junk)
    def check(tree: dict[int, dict[str, str]], processor: str, sizes: dict[str, str], setting: str) -> None:
        files.tree = {
            "proc/cpuinfo": processor,
            "sys/kernel/mm/transparent_hugepage/enabled": setting,
            **{f"sys/kernel/mm/hugepages/{name}/nr_hugepages": text for name, text in sizes.items()},
            **{
                f"sys/devices/system/node/node{n}/{name}": text
                for n, told in tree.items()
                for name, text in told.items()
            },
        }
        inventory = host.numa_nodes(ROOT)
        assert [node.number for node in inventory.nodes] == sorted(n for n, told in tree.items() if told)
        for node in inventory.nodes:
            fields = ("cpus", "memory_total_bytes", "memory_free_bytes", "distances")
            assert {name for name in fields if getattr(node, name) is None} == set(node.unavailable)
        chosen = host.device_nodes(ROOT, inventory.nodes, [96 << 10])
        assert len(chosen) <= 1
        assert all(node.cpus == frozenset() for node in chosen)

        info, features = host.cpu_info(ROOT), host.cpu_features(ROOT)
        assert info.name
        assert info.vendor
        assert info.instruction_set
        assert features.architecture
        assert features.level is None or features.flags

        pages = host.huge_pages(ROOT)
        sound = {name for name in sizes if name not in ("hugepages-kB", "hugepages-0kB")}
        assert len(pages.pools) == len(sound)
        assert len(pages.skipped) >= len(sizes) - len(sound)

    check()
