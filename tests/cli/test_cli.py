"""The command line: what each command prints, and that every error is a sentence and a code."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import agent
from agent import config
from agent.cli import COMMANDS, execute
from agent.errors import ExitCode

HOSTS = Path(__file__).parents[1] / "hosts"
README = Path(__file__).parents[2] / "README.md"
B50 = "intel.com/gpu=0000-03-00-0-0xe212"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process: its exit code, output and errors."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = execute(argv)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def empty_host(tmp_path: Path) -> str:
    """The configuration of a host without any device, all of it below a temporary folder."""
    for name in ("sys/bus/pci/devices", "dev", "run/udev", "proc/self"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "run/udev/control").touch()
    (tmp_path / "proc/self/mountinfo").write_text(
        f"24 28 0:6 / {tmp_path}/dev rw - devtmpfs udev rw\n"
    )
    file = tmp_path / "config.yaml"
    file.write_text(
        f"state_directory: {tmp_path}/state\n"
        f"host: {{sys: {tmp_path}/sys, dev: {tmp_path}/dev, run: {tmp_path}/run, "
        f"proc: {tmp_path}/proc}}\n"
        f"cdi: {{directory: {tmp_path}/cdi, other_directories: []}}\n"
    )
    return str(file)


class TestWhole:
    def test_help_and_the_guide_have_the_same_exit_codes(self, run: Run) -> None:
        readme = " ".join(README.read_text().split())
        _, out, _ = run("--help")
        (of_help,) = re.findall(r"Exit codes: (.*?\.)$", " ".join(out.split()))
        of_readme = readme[readme.index("Exit codes follow sysexits.h") :]
        of_readme = of_readme[: of_readme.index("Names:")]
        numbers = set(re.findall(r"\b\d+\b", of_help))
        assert numbers - {"0"} == set(re.findall(r"\b\d+\b", of_readme))
        assert numbers <= {str(int(code)) for code in ExitCode}

    def test_version(self, run: Run) -> None:
        assert run("--version") == (0, f"cdi-agent {agent.__version__}\n", "")

    def test_help_lists_every_command(self, run: Run) -> None:
        code, out, _ = run("--help")
        assert code == 0
        assert [name for name in COMMANDS if f"  {name} " not in out] == []

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_command_has_help_that_begins_as_the_list_says(self, run: Run, name: str) -> None:
        code, out, _ = run(name, "--help")
        assert code == 0
        assert COMMANDS[name][1].lower()[:18] in " ".join(out.split()).lower()

    @pytest.mark.parametrize(
        "argv",
        [
            pytest.param(["publish"], id="unknown command"),
            pytest.param(["scan", "--colour"], id="unknown option"),
            pytest.param(["scan", "-o", "xml"], id="unknown format"),
            pytest.param(["scan", "--from", "/nonexistent"], id="no such capture"),
        ],
    )
    def test_wrong_use_exits_with_64(self, run: Run, argv: list[str]) -> None:
        code, out, err = run(*argv)
        assert (code, out) == (ExitCode.USAGE, "")
        assert "Error: " in err

    def test_the_service_imports_no_other_command(self) -> None:
        program = (
            "import sys; from agent.cli import execute; execute(['run', '--help'])\n"
            "loaded = {name for name in sys.modules if name.startswith('agent.')}\n"
            "assert 'agent.cli.run' in loaded\n"
            "unwanted = ('agent.simulate', 'agent.cli.scan', 'agent.cli.demo')\n"
            "assert not [name for name in loaded if name.startswith(unwanted)]\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)

    def test_help_and_completion_wait_for_nothing_that_only_commands_need(self) -> None:
        program = (
            "import sys; from agent.cli import execute; execute(['--help'])\n"
            "slow = {'asyncio', 'msgspec', 'rich', 'structlog', 'yaml'}\n"
            "assert not slow & sys.modules.keys()\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)

    def test_a_reader_that_has_seen_enough_hears_no_complaint(self) -> None:
        scan = [sys.executable, "-m", "agent", "scan", "--all", "--from", f"{HOSTS}/bmc-only.yaml"]
        reader, writer = os.pipe()
        os.close(reader)
        try:
            process = subprocess.run(
                scan, stdout=writer, stderr=subprocess.PIPE, check=False, text=True
            )
        finally:
            os.close(writer)
        assert (process.returncode, process.stderr) == (1, "")

    @pytest.mark.parametrize(
        ("argv", "code"),
        [
            pytest.param(["scan", "--from", f"{HOSTS}/bmc-only.yaml"], ExitCode.IO, id="a line"),
            pytest.param(
                ["scan", "--all", "-o", "json", "--from", f"{HOSTS}/amd-mi300x-partitioned.yaml"],
                ExitCode.IO,
                id="more than a buffer",
            ),
            *(pytest.param([name, "--help"], ExitCode.IO, id=name) for name in COMMANDS),
            pytest.param(["demo", "--pause", "0"], ExitCode.IO, id="in the middle of work"),
            pytest.param(["status", "-c", "/nonexistent"], ExitCode.CONFIG, id="no output"),
        ],
    )
    def test_a_full_disk_is_one_sentence_and_a_code_that_means_nothing_else(
        self, argv: list[str], code: ExitCode
    ) -> None:
        """That of `status` is read by scripts; and it is right where no sentence can be said."""
        command = [sys.executable, "-m", "agent", *argv]
        with open("/dev/full", "w") as full:
            told = subprocess.run(
                command, stdout=full, stderr=subprocess.PIPE, check=False, text=True
            )
            silent = told
            if "--help" not in argv:
                silent = subprocess.run(command, stdout=full, stderr=full, check=False, text=True)
        assert (told.returncode, silent.returncode) == (code, code)
        if code is ExitCode.IO:
            said = "cdi-agent: the output cannot be written: No space left on device\n"
            assert told.stderr == said

    def test_closed_standard_descriptors_are_no_place_for_other_files(self, tmp_path: Path) -> None:
        """Some start services so; what is opened next would be taken for standard error."""
        said = tmp_path / "said"
        program = (
            "import sys; from agent import cli\n"
            "try: cli.main(['check-config', sys.argv[1]])\n"
            "except SystemExit as end: code = end.code\n"
            "with open(sys.argv[2], 'w') as file:\n"
            "    print(code, file.fileno(), sys.stdout.fileno(), sys.stderr.fileno(), file=file)\n"
        )
        config = tmp_path / "config.yaml"
        config.touch()
        closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
        subprocess.run([*closed, sys.executable, "-c", program, config, said], check=False)
        code, *numbers = map(int, said.read_text().split())
        assert code == 0
        assert min(numbers) > 2


class TestScan:
    def test_tells_what_would_be_published(self, run: Run) -> None:
        code, out, _ = run("scan", "--from", f"{HOSTS}/intel-arc-b50.yaml")
        assert code == 0
        assert f"publish  {B50}" in " ".join(out.split()).replace("publish ", "publish  ")
        assert "/dev/dri/card0 /dev/dri/renderD128" in out

    def test_tells_why_a_device_is_not_published(self, run: Run) -> None:
        _, out, _ = run("scan", "--from", f"{HOSTS}/bmc-only.yaml")
        assert "unmatched" in out
        assert "no profile recognises 1a03:2000" in out

    def test_all_shows_every_function_in_order(self, run: Run) -> None:
        _, some, _ = run("scan", "-o", "json", "--from", f"{HOSTS}/bmc-only.yaml")
        _, every, _ = run("scan", "-o", "json", "--all", "--from", f"{HOSTS}/bmc-only.yaml")
        addresses = [row["address"] for row in json.loads(every)["devices"]]
        assert len(addresses) > len(json.loads(some)["devices"])
        assert addresses == sorted(addresses)

    def test_nodes_of_no_function_are_named_and_what_is_alike_is_said_once(self, run: Run) -> None:
        _, out, _ = run("scan", "--from", f"{HOSTS}/amd-mi300x-partitioned.yaml")
        _, told = out.split("no PCI function\n")
        first, *others = map(str.split, told.splitlines())
        assert first[:5] == ["policy", "/dev/dri/card2", "it", "is", "a"]
        nodes = ("card3", "card4", "renderD129", "renderD130", "renderD131")
        assert others == [["policy", f"/dev/dri/{node}", "as", "above"] for node in nodes]

    def test_a_capture_has_one_form_and_no_other_is_promised(self, run: Run) -> None:
        capture = ("scan", "--from", f"{HOSTS}/bmc-only.yaml", "--capture", "-")
        code, out, err = run(*capture, "-o", "json")
        assert (code, out) == (ExitCode.USAGE, "")
        assert "--capture writes YAML" in err

    def test_json_has_the_facts(self, run: Run) -> None:
        _, out, _ = run("scan", "-o", "json", "--from", f"{HOSTS}/intel-arc-b50.yaml")
        (gpu,) = [row for row in json.loads(out)["devices"] if row["kind"] == "intel.com/gpu"]
        assert gpu["id"] == "8086:e212"
        assert gpu["driver"] == "xe"
        assert gpu["state"] == "publish"
        assert gpu["nodes"] == ["/dev/dri/card0", "/dev/dri/renderD128"]

    def test_a_capture_of_a_captured_host_is_the_same_host(self, run: Run, tmp_path: Path) -> None:
        again = tmp_path / "again.yaml"
        code, _, _ = run("scan", "--from", f"{HOSTS}/intel-two-b60.yaml", "--capture", str(again))
        assert code == 0
        first = run("scan", "-o", "json", "--all", "--from", f"{HOSTS}/intel-two-b60.yaml")
        assert run("scan", "-o", "json", "--all", "--from", str(again)) == first

    def test_a_capture_that_cannot_be_written_is_one_sentence(
        self, run: Run, empty_host: str
    ) -> None:
        code, _, err = run("scan", "-c", empty_host, "--capture", "/nonexistent/x.yaml")
        assert code == ExitCode.CANNOT_CREATE
        assert err == (
            "cdi-agent: /nonexistent/x.yaml cannot be written: No such file or directory\n"
        )

    def test_a_host_without_devices_is_no_error(self, run: Run, empty_host: str) -> None:
        code, out, err = run("scan", "-c", empty_host)
        assert (code, err) == (0, "")
        assert out == (
            "This host has no device that could be published (--all shows every PCI function).\n"
        )

    def test_what_is_no_capture_is_one_sentence(self, run: Run) -> None:
        code, out, err = run("scan", "--from", "/etc/passwd")
        assert (code, out) == (ExitCode.DATA, "")
        assert err.startswith("cdi-agent: /etc/passwd")
        assert "Traceback" not in err


class TestGenerate:
    def leave_a_stale_spec(self, folder: Path) -> Path:
        """A spec of ours from an earlier run, for a device that is gone."""
        from agent.cdi.files import file_name
        from agent.cdi.render import render
        from agent.cdi.spec import ContainerEdits, Device, DeviceNode, Kind, Spec

        node = DeviceNode("/dev/dri/card0", "/dev/dri/card0")
        spec = Spec(Kind("intel.com/gpu"), (Device("gone", ContainerEdits((node,))),))
        file = folder / "cdi" / file_name(spec.kind)
        file.parent.mkdir()
        file.write_bytes(render(spec))
        return file

    def test_dry_run_says_what_would_be_done_and_does_nothing(
        self, run: Run, empty_host: str, tmp_path: Path
    ) -> None:
        stale = self.leave_a_stale_spec(tmp_path)
        code, out, _ = run("generate", "-c", empty_host, "--dry-run")
        assert (code, out) == (0, f"delete {stale}: -gone\n")
        assert stale.exists()

    def test_diff_shows_the_change(self, run: Run, empty_host: str, tmp_path: Path) -> None:
        stale = self.leave_a_stale_spec(tmp_path)
        _, out, _ = run("generate", "-c", empty_host, "--dry-run", "--diff")
        assert out.startswith(f"--- {stale}\n+++ /dev/null\n")
        assert '-  - name: "gone"\n' in out

    def test_without_dry_run_it_is_done(self, run: Run, empty_host: str, tmp_path: Path) -> None:
        stale = self.leave_a_stale_spec(tmp_path)
        code, _, err = run("generate", "-c", empty_host)
        assert code == 0, err
        assert not stale.exists()
        assert run("generate", "-c", empty_host, "--dry-run") == (0, "", "nothing to do\n")

    def test_delete_leaves_no_spec_of_ours(self, run: Run, empty_host: str, tmp_path: Path) -> None:
        stale = self.leave_a_stale_spec(tmp_path)
        foreign = stale.with_name("vendor.yaml")
        foreign.write_text("kind: intel.com/gpu\n")
        assert run("generate", "-c", empty_host, "--delete")[0] == 0
        assert list(stale.parent.iterdir()) == [foreign]

    def test_it_does_not_write_beside_the_service(
        self, run: Run, empty_host: str, tmp_path: Path
    ) -> None:
        from agent.cli.lock import instance_lock

        stale = self.leave_a_stale_spec(tmp_path)
        with instance_lock(tmp_path / "state", [tmp_path / "cdi"]):
            code, _, err = run("generate", "-c", empty_host)
        assert code == ExitCode.TEMPORARY
        assert "another cdi-agent holds" in err
        assert stale.exists()


class TestCheckConfig:
    def test_a_good_file(self, run: Run, empty_host: str) -> None:
        assert run("check-config", empty_host) == (0, f"{empty_host} is good\n", "")

    @pytest.mark.parametrize(
        "command",
        [
            ["check-config"],
            ["run"],
            ["scan"],
            ["generate", "--dry-run"],
            ["status"],
        ],
        ids=lambda command: command[0],
    )
    def test_every_fault_is_told_at_once_each_on_its_line_by_every_command(
        self, run: Run, tmp_path: Path, command: list[str]
    ) -> None:
        file = tmp_path / "config.yaml"
        file.write_text("cdi:\n  formt: yaml\nreconcile:\n  settle: soon\n")
        code, out, err = run(*command, "-c", str(file))
        assert (code, out) == (ExitCode.CONFIG, "")
        summary, one, two, hint = err.splitlines()
        assert summary == f"cdi-agent: {file} cannot be used:"
        assert one.startswith("  line 2: cdi.formt")
        assert two.startswith("  line 4: reconcile.settle")
        assert hint.startswith("  hint: ")

    def test_a_missing_file(self, run: Run, tmp_path: Path) -> None:
        code, _, err = run("check-config", str(tmp_path / "none.yaml"))
        assert code == ExitCode.CONFIG
        assert err.startswith(f"cdi-agent: {tmp_path}/none.yaml does not exist")

    @pytest.mark.parametrize(
        "command",
        [["check-config"], ["check-config", "-c"], ["scan", "-c"], ["status", "-c"]],
        ids=" ".join,
    )
    def test_a_file_that_may_not_be_read_is_a_configuration_that_cannot_be_used(
        self, tmp_path: Path, command: list[str]
    ) -> None:
        """And no wrong usage. As root there is no such file."""
        file = tmp_path / "config.yaml"
        file.touch(mode=0)
        tmp_path.chmod(0o755)
        as_nobody = (
            "import os, sys; from agent import cli\n"
            "from agent.cli import check_config, orders, scan\n"
            "os.geteuid() or os.setresuid(65534, 65534, 65534)\n"
            "cli.main(sys.argv[1:])\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", as_nobody, *command, file.name],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == ExitCode.CONFIG
        assert done.stderr == "cdi-agent: config.yaml cannot be read: Permission denied\n"

    @pytest.mark.parametrize(
        ("text", "code", "out", "err"),
        [
            ("log: {level: debug}", 0, "standard input is good\n", ""),
            ("lg: 1", ExitCode.CONFIG, "", "cdi-agent: standard input cannot be used:\n"),
            ("#" * (2**20 + 1), ExitCode.CONFIG, "", "cdi-agent: standard input cannot be used:\n"),
        ],
        ids=["good", "bad", "too much"],
    )
    def test_standard_input(self, text: str, code: int, out: str, err: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "agent", "check-config", "-"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (code, out)
        assert done.stderr.startswith(err)
        assert bool(done.stderr) == bool(err)

    def test_standard_input_that_cannot_be_read(self, tmp_path: Path) -> None:
        with (tmp_path / "written").open("w") as only_written:
            done = subprocess.run(
                [sys.executable, "-m", "agent", "check-config", "-"],
                stdin=only_written,
                capture_output=True,
                text=True,
                check=False,
            )
        assert done.returncode == ExitCode.CONFIG
        assert done.stderr == "cdi-agent: standard input cannot be read: Bad file descriptor\n"

    def test_the_example_is_printed_as_it_is_and_can_be_used(
        self, run: Run, tmp_path: Path
    ) -> None:
        code, out, err = run("check-config", "--example")
        assert (code, err) == (0, "")
        assert out == (Path(__file__).parents[2] / "config.example.yaml").read_text()
        file = tmp_path / "config.yaml"
        file.write_text(out)
        assert run("check-config", str(file)) == (0, f"{file} is good\n", "")

    def test_a_group_that_this_host_does_not_have_is_a_warning(
        self, run: Run, tmp_path: Path
    ) -> None:
        """The file may be for another host."""
        file = tmp_path / "config.yaml"
        file.write_text("control: {group: no-such-group}\n")
        code, out, err = run("check-config", str(file))
        assert (code, out) == (0, f"{file} is good\n")
        assert err.startswith("warning: control.group: this host has no group no-such-group, ")
        file.write_text("control: {group: root}\n")
        assert run("check-config", str(file)) == (0, f"{file} is good\n", "")

    def test_no_file_at_all_is_good(
        self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(config, "DEFAULT_PATH", tmp_path / "none.yaml")
        code, out, _ = run("check-config")
        assert code == 0
        assert out == f"{tmp_path}/none.yaml does not exist: every key has its default\n"


def on_a_terminal(argv: list[str], **environ: str) -> str:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    unwanted = {"NO_COLOR", "TERM", "COLUMNS"}
    inherited = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment = {**inherited, "TERM": "xterm", **environ}
    command = [sys.executable, "-m", "agent", *argv]
    with subprocess.Popen(command, stdout=theirs, env=environment) as process:
        os.close(theirs)
        written = b""
        with contextlib.suppress(OSError):  # EIO: the terminal's other end is closed
            while chunk := os.read(ours, 4096):
                written += chunk
    os.close(ours)
    assert process.returncode == 0
    return written.decode()


@pytest.mark.parametrize(
    "argv",
    [["scan", "--from", f"{HOSTS}/bmc-only.yaml"], ["demo", "--pause", "0"]],
    ids=["scan", "demo"],
)
@pytest.mark.parametrize(
    ("environ", "coloured"),
    [
        pytest.param({}, True, id="a terminal"),
        pytest.param({"NO_COLOR": "1"}, False, id="NO_COLOR"),
        pytest.param({"NO_COLOR": ""}, True, id="NO_COLOR empty"),
        pytest.param({"TERM": "dumb"}, False, id="dumb"),
    ],
)
def test_a_terminal_is_sent_colours_unless_it_or_the_user_wants_none(
    argv: list[str], environ: dict[str, str], *, coloured: bool
) -> None:
    assert ("\x1b[" in on_a_terminal(argv, **environ)) is coloured


class TestDemo:
    @pytest.mark.parametrize(("columns", "most"), [(40, 40), (80, 80), (200, 80)])
    def test_fits_a_terminal(self, columns: int, most: int) -> None:
        """But for what cannot be broken: commands, names of files, and lines of them."""
        written = on_a_terminal(["demo", "--pause", "0"], COLUMNS=str(columns), NO_COLOR="1")
        lines = written.replace("\r\n", "\n").splitlines()
        prose = [line for line in lines if not line.startswith(" ")]
        assert max(map(len, prose)) <= most
        if columns >= 80:
            told = [line for line in lines if line.startswith(("   wrote", "   deleted", "   #"))]
            assert max(map(len, told)) <= most

    def test_plays_the_story_to_its_end(self) -> None:
        """As a user runs it: a process of its own."""
        process = subprocess.run(
            [sys.executable, "-m", "agent", "demo", "--pause", "0"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TMPDIR": "/tmp"},
        )
        assert process.returncode == 0, process.stderr
        lines = [
            line.split(" (")[0].split()
            for line in process.stdout.splitlines()
            if line.startswith(("   wrote", "   deleted"))
        ]
        gpu, vfio = (
            f"/var/run/cdi/cdi-agent_intel.com-gpu{suffix}.yaml" for suffix in ("", "-vfio")
        )
        assert lines == [
            ["wrote", gpu],
            ["deleted", gpu],
            ["wrote", vfio],
            ["deleted", vfio],
            ["wrote", gpu],
            ["wrote", gpu],
            ["wrote", gpu],
        ]
        assert process.stdout.count(" ms)\n") == len(lines)
