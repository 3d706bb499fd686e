"""The pages say what is there: snippets run, files and names exist, figures are the defaults."""

from __future__ import annotations

import ast
import builtins
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from docs import write_api
from tests.needs import needs
from tests.suites import each_case

import paramserve
from paramserve import errors
from paramserve.rules import torch_kinds
from paramserve.rules.registry import BUILT_IN

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paramserve"
BESIDE = sorted(ROOT.glob("packages/*/src"))
"""Of the distributions beside paramserve; their modules are named with their package."""
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
GUIDE = ROOT / "docs" / "guide.md"
TABLES = ROOT / "docs" / "tables.md"
EXAMPLES = ROOT / "docs" / "examples.md"
CHECKPOINTS = ROOT / "docs" / "checkpoints.md"
COMPRESSION = ROOT / "docs" / "compression.md"
METRICS = ROOT / "docs" / "metrics.md"
RECIPES = ROOT / "docs" / "recipes.md"
TROUBLES = ROOT / "docs" / "troubleshooting.md"
PROMISES = ROOT / "docs" / "promises.md"
RULES = ROOT / "docs" / "rules.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPETS_TIMEOUT_S = 240.0

OBJECTS = {
    "error": "ParamServeError",
    "worker": "Worker",
    "client": "Client",
    "deadlines": "Deadlines",
    "optimizer": "ServedOptimizer",
    "job": "Job",
    "ticket": "Ticket",
    "handle": "Handle",
    "cluster": "Cluster",
    "result": "Result",
    "table": "Table",
    "users": "Table",
    "module": "Embedding",
    "loader": "Loader",
}
"""Variables that the pages use for an instance of a class."""
FOREIGN = {
    "functools",
    "torch",
    "loss",
    "nn",
    "np",
    "os",
    "sys",
    "ray",
    "pyarrow",
    "model",
    "tf",
    "wandb",
}


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def spans(page: Path) -> list[str]:
    """Everything between backticks in a page, outside fenced blocks, each once."""
    return list(
        dict.fromkeys(" ".join(each.split()) for each in re.findall("`([^`]+)`", prose(page)))
    )


def snippets(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)


class Names:
    """What the package defines: read from its source, so that nothing is imported."""

    def __init__(self) -> None:
        self.top: dict[str, set[str]] = defaultdict(set)
        """By module (dotted, below the package): its functions, classes and variables."""
        self.members: dict[str, set[str]] = defaultdict(set)
        """By class: its methods and attributes, those of its bases in the package too."""
        bases: dict[str, list[str]] = {}
        folders = (SOURCE, *BESIDE)
        for folder, path in ((f, p) for f in folders for p in sorted(f.rglob("*.py"))):
            parts = path.relative_to(folder).with_suffix("").parts
            module = ".".join(part for part in parts if part != "__init__")
            for node in ast.parse(path.read_text()).body:
                self.top[module].update(_targets(node))
                if isinstance(node, ast.ClassDef):
                    found = [each.id for each in node.bases if isinstance(each, ast.Name)]
                    bases.setdefault(node.name, []).extend(found)  # two modules may have one name
                    self.members[node.name].update(_members(node))
        for name in bases:
            self.members[name] |= set().union(*(self.members[b] for b in _ancestors(name, bases)))

    def has(self, name: str) -> bool:
        """Whether a dotted name, `Class.member` or `Class` is there."""
        owner, _, last = name.rpartition(".")
        owner = owner.removeprefix("paramserve.")
        if not owner:
            return any(last in defined for defined in self.top.values())
        if owner in ("ps", "paramserve"):
            return last in paramserve.__all__ or (owner == "paramserve" and last in self.top)
        if owner == "ps.pytorch":
            return last in paramserve.pytorch.__all__
        if owner == "ps.errors":
            return last in errors.KINDS
        if name.removeprefix("paramserve.") in self.top:
            return True
        variable = owner.rpartition(".")[2]  # worker.client.assign
        kind = OBJECTS.get(variable, owner)
        return last in self.members.get(kind, ()) or any(
            last in self.top[module]
            for module in self.top
            if module == owner or module.endswith(f".{owner}")
        )


def _targets(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.AnnAssign):
        yield ast.unparse(node.target)
    elif isinstance(node, ast.Assign):
        yield from map(ast.unparse, node.targets)
    elif isinstance(node, ast.ImportFrom):
        yield from (each.asname or each.name for each in node.names)


def _members(node: ast.ClassDef) -> Iterator[str]:
    for child in node.body:
        yield from _targets(child)
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            yield child.attr


def _ancestors(name: str, bases: dict[str, list[str]]) -> Iterator[str]:
    for base in bases.get(name, ()):
        yield base
        yield from _ancestors(base, bases)


@pytest.fixture(scope="module")
def names() -> Names:
    return Names()


def programs(page: Path) -> list[str]:
    """The programs of a page; the blocks of some pages are one program together."""
    code = snippets(page)
    if page == EXAMPLES:
        return ["\n".join(code)]
    found: list[str] = []
    for each in code:
        if each.startswith("import") or "import paramserve as ps" in each:
            found.append(each)
        elif found and "import" not in each and "ps.run(train" in each:  # goes on with the last one
            found[-1] += f"\n{each}"
    return found


EACH_ALONE = """
import os, runpy, sys
for path in sys.argv[1:]:
    print("# begins", path, flush=True)
    print("# begins", path, file=sys.stderr, flush=True)
    os.chdir(os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
"""
"""Runs programs one after the other, each in a module of its own and where it stands; what they
import stays."""


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    "pages",
    [
        pytest.param((README, GUIDE, CHECKPOINTS, METRICS, RECIPES), id="quick"),
        *(
            pytest.param((page,), marks=pytest.mark.slow, id=page.stem)
            for page in (COMPRESSION, EXAMPLES, TABLES)
        ),
    ],
)
def test_snippets_of_pages_run(pages: Sequence[Path], tmp_path: Path) -> None:
    codes: dict[str, str] = {}
    for page in pages:
        of_page = programs(page)
        if page in (GUIDE, RECIPES):  # the others run below, also with a death
            of_page = [each for each in of_page if "Restart()" not in each]
        assert of_page
        codes |= {f"{page.stem}/{number}": each for number, each in enumerate(of_page)}
    if any("parquet" in code or "save_tables" in code for code in codes.values()):
        needs("pyarrow")
    told = each_alone(tmp_path, [*codes.values()], "-W", "error", names=[*codes])
    for (name, code), output in zip(codes.items(), told, strict=True):
        shows = len(output.splitlines()) > 1 or "assert" in code
        assert shows, f"nothing is shown by {name}:\n{code}"


def each_alone(
    folder: Path, codes: Sequence[str], *options: str, names: Sequence[str] = ()
) -> list[str]:
    """What programs print that one interpreter runs one after the other, as if each were alone."""
    names = names or [f"program_{number}" for number in range(len(codes))]
    paths = [folder / f"{name}.py" for name in names]
    for path, code in zip(paths, codes, strict=True):
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
    # Ray's variables name a cluster if other tests of this session have one: a reader has none.
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with tempfile.TemporaryDirectory(prefix="ps-", dir="/tmp", ignore_cleanup_errors=True) as short:
        done = subprocess.run(
            [sys.executable, *options, "-c", EACH_ALONE, *map(str, paths)],
            cwd=folder,
            env={**own, "RAY_TMPDIR": short},
            capture_output=True,
            text=True,
            timeout=SNIPPETS_TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "not trained" not in done.stderr  # a run does not raise its warnings
    return done.stdout.split("# begins ")[1:]


DIES = (
    "if (worker.rank, worker.clock, worker.incarnation) == (0, {}, 1): "
    "print('dies', flush=True); os.kill(os.getpid(), 9)"
)


@pytest.mark.slow
def test_converted_scripts_go_on_where_rank_0_died(tmp_path: Path) -> None:
    """Each epoch is evaluated and saved once; the schedule and the best model are those of the
    whole run."""
    (after,) = (code for code in programs(GUIDE) if "Restart()" in code)
    (resume,) = (code for code in programs(RECIPES) if "FILE = " in code)
    logged, stepped = "worker.log(loss=loss)", "optimizer.step()"
    assert after.count(logged) == resume.count(stepped) == 1
    after = after.replace(logged, f"{DIES.format(12)}\n{' ' * 16}{logged}")
    after += "print(torch.load(BEST)['accuracy'] == result.returns[0], len(result.restarts))\n"
    resume = resume.replace(stepped, f"{stepped}\n{' ' * 12}{DIES.format(6)}")
    converted, resumed = (told.splitlines()[1:] for told in each_alone(tmp_path, [after, resume]))
    assert [re.sub(":.*", "", line) for line in converted] == [
        "[rank 0] epoch 0",
        "[rank 0] dies",
        "[rank 0] epoch 1",
        "[rank 0] epoch 2",
        "True 1",
    ]
    first, second = "{0: (0, 0.025), 1: (0, 0.025)}", "{0: (2, 0.0125), 1: (2, 0.0125)}"
    assert resumed == ["[rank 0] dies", first, second]


WORDS = ["get_worker_info", "offset", "AveragedModel(", "AveragedAdamW", "Images", "MaxNorm"]
"""Each in one program of the recipes."""


@pytest.mark.slow
def test_programs_that_restart_workers_run_without_a_death(tmp_path: Path) -> None:
    codes = [each for page in (GUIDE, RECIPES) for each in programs(page) if "Restart()" in each]
    codes = [each for each in codes if not any(word in each for word in WORDS)]
    assert len(codes) == 3
    told = each_alone(tmp_path, codes, "-W", "error")
    for code, output in zip(codes, told, strict=True):
        assert len(output.splitlines()) > 1, f"nothing is shown by:\n{code}"


@pytest.mark.slow
@pytest.mark.parametrize("word", WORDS)
def test_recipe_ends_as_without_a_death(word: str, tmp_path: Path) -> None:
    """Streams, averages, augmentation and several optimizers come back exactly."""
    (code,) = (each for each in snippets(RECIPES) if word in each and "Restart()" in each)
    line = re.compile(r"^( +)(?=optimizer\.zero_grad|for each in optimizers:)", re.MULTILINE)
    broken = line.sub(rf"\g<1>import os\n\g<1>{DIES.format(9)}\n\g<1>", code, count=1)
    first, second = each_alone(tmp_path, [code, broken], "-W", "error")
    assert second.splitlines()[1:] == ["[rank 0] dies", *first.splitlines()[1:]]


@pytest.mark.slow
def test_plateau_and_early_stop_of_a_run_that_goes_on_are_those_of_an_unbroken_one(
    tmp_path: Path,
) -> None:
    """Rank 0 dies in the second epoch, and the run goes on after the fourth one."""
    (code,) = (each for each in programs(RECIPES) if "ReduceLROnPlateau(" in each)
    for written, other in (("lr=0.02", "lr=0.1"), ("resume=True", "resume=True, seed=0")):
        assert code.count(written) == 1
        code = code.replace(written, other)
    code = code.replace('"runs/a-best.pt", 5', '"runs/a-best.pt", 3')
    dies = code.replace("optimizer.step()\n", f"optimizer.step()\n{' ' * 12}{DIES.format(12)}\n")
    broken = dies.replace("in (3, 6)", "in (4, 40)")
    whole = code.replace("in (3, 6)", "in (40,)").replace("runs/a", "runs/b")
    first, second = (told.splitlines()[1:] for told in each_alone(tmp_path, [broken, whole]))
    assert first[0] == "[rank 0] dies"
    assert first[2:] == second
    assert "{0: (18, " in second[0], "it has stopped early"
    assert second[0].endswith(", 0.05)}"), "and lowered its rate"


def test_readme_is_short_and_runs_a_model_and_a_table() -> None:
    assert len(README.read_text().splitlines()) <= 150
    code = snippets(README)
    assert any("ps.run(" in each for each in code)
    assert any("client.table(" in each for each in code)


def test_pages_tell_of_every_built_in_rule() -> None:
    """What has no compiled rule runs in torch on the servers: the pages say which classes have."""
    table, _, rest = RULES.read_text().partition("## Your own")
    assert rest
    assert not [name for name in BUILT_IN if f"`ps.{name}`" not in table]
    line = re.compile(r"\*\*The rules are torch's\.\*\* (.*) equal those")
    (promise,) = line.findall(PROMISES.read_text())
    classes = {kind.__name__ for kind in torch_kinds._KERNELS} | {"Adagrad"}
    assert set(re.findall(r"\w+", promise)) - {"and"} == classes
    docstring = paramserve.Worker.optimizer.__doc__ or ""
    told = re.findall(r"rounded once\. (.*?) are compiled", " ".join(docstring.split()))
    assert {each.__name__ for each in torch_kinds._KERNELS} <= set(re.findall(r"\w+", told[0]))


def test_readme_ratios_are_measured() -> None:
    ratios = re.findall(r"(?<![\w.])\d[\d.]*x(?!\w)", README.read_text())
    assert ratios
    measured = set(re.findall(r"(?<![\w.])\d[\d.]*x (?:Ray|RPC)", BENCHMARKS.read_text()))
    assert {
        f"{each} {name}" for each, name in zip(ratios, ["Ray", "RPC"] * 3, strict=True)
    } <= measured


@each_case("page", PAGES, ids=lambda page: page.name)
def test_page_names_only_files_that_exist(page: Path) -> None:
    wrong = [
        name
        for name in spans(page)
        if re.fullmatch(r"[\w./-]+(\.py|\.toml|\.txt|/)", name)
        and not name.startswith(("runs/", "/"))
        if name not in ("script.py", "train.py")
        if not any((folder / name).exists() for folder in (ROOT, SOURCE, *BESIDE))
    ]
    assert not wrong, f"{page.name} names files that do not exist: {wrong}"


@each_case("page", PAGES, ids=lambda page: page.name)
def test_page_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", prose(page))
    wrong = [each for each in targets if not each.startswith("http")]
    wrong = [each for each in wrong if not (page.parent / each).exists()]
    assert not wrong, f"{page.name} links to what does not exist: {wrong}"


@each_case("page", PAGES, ids=lambda page: page.name)
def test_page_links_lead_to_headings(page: Path) -> None:
    links = re.findall(r"\]\(([\w./-]*)#([^)]+)\)", prose(page))
    targets = [((page.parent / name) if name else page, anchor) for name, anchor in links]
    wrong = [f"{to.name}#{anchor}" for to, anchor in targets if anchor not in headings(to)]
    assert not wrong, f"{page.name} links to headings that do not exist: {wrong}"


@functools.cache
def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub and the site name them."""
    found = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {write_api.anchor(each.replace(" ", "-")) for each in found}


@each_case("page", PAGES, ids=lambda page: page.name)
def test_page_names_only_what_the_code_defines(page: Path, names: Names) -> None:
    dotted = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+(\(.*\))?"
    camel = r"[A-Z][A-Za-z]*[a-z][A-Za-z]*"
    call = r"[a-z_]+\(\)"
    wrong = []
    for span in spans(page):
        if not re.fullmatch(f"{dotted}|{camel}|{call}", span) or span.endswith(
            (".py", ".toml", ".txt", ".md")
        ):
            continue
        name = re.sub(r"\(.*\)$", "", span)
        if page == write_api.REFERENCE and any(name in each for each in names.members.values()):
            continue  # a docstring names its neighbours
        if name.partition(".")[0] not in FOREIGN and name not in KNOWN and not names.has(name):
            wrong.append(span)
    assert not wrong, f"{page.name} names what the code does not define: {wrong}"


KNOWN = {
    "AdamW",
    "AveragedModel",
    "CosineAnnealingLR",
    "DataLoader",
    "GradScaler",
    "IterableDataset",
    "ObjectRef",
    "ReduceLROnPlateau",
    "SparseAdam",
    "fit",
    *dir(builtins),
}
"""Of torch, Ray and Python."""


def messages() -> Iterator[str]:
    """Every string in the package's source as a pattern: the values of an f-string may be any."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else None for p in node.values)
                yield "".join(".+" if part is None else re.escape(str(part)) for part in parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.escape(node.value)


def test_quoted_messages_stand_in_the_source() -> None:
    quoted = {span for page in PAGES for span in spans(page) if span.startswith("paramserve:")}
    assert quoted, "no page quotes a message"
    said = [re.compile(each) for each in messages() if len(each.replace(".+", "")) > 20]
    plain = {quote: quote.removeprefix("paramserve: ") for quote in quoted}
    wrong = [q for q, text in plain.items() if not any(each.fullmatch(text) for each in said)]
    assert not wrong, f"nothing in the source says: {wrong}"


def test_names_find_what_is_there_and_nothing_else(names: Names) -> None:
    for there in ("Shard.step", "Dense.step", "Client.push", "collecting.collect", "ps.run"):
        assert names.has(there), there
    for absent in ("Shard.jump", "Nobody", "stepping.nothing", "ps.table", "client.columns"):
        assert not names.has(absent), absent


BESIDE_NAMES = {
    f"{module}.{name}" for module, names in paramserve._BESIDE.items() for name in names.split()
}
"""Public names that `paramserve` itself does not have."""


def test_index_of_the_reference_has_every_public_name_with_its_summary() -> None:
    index = write_api.index()
    rows = dict(re.findall(r"^\| \[`([\w.]+)`\]\(.*?\) \| (.*) \|$", index, re.M))
    assert set(rows) >= {*(f"ps.{name}" for name in paramserve.__all__), *BESIDE_NAMES}
    assert all(rows.values()), "a public name has no docstring"
    assert index in write_api.REFERENCE.read_text()


def test_reference_has_the_whole_docstring_of_every_public_name() -> None:
    text = write_api.reference()
    assert write_api.REFERENCE.read_text() == text, "run: python docs/write_api.py"
    _, _, view = text.partition("### `consistency.GroupView`\n")
    attributes = re.findall(r"^- `(\w+)`: ", view.partition("\n### ")[0], re.MULTILINE)
    assert attributes[:4] == ["clocks", "slowest", "version", "buffered"], "of a protocol"
    assert "(*args, **kwargs)" not in text
    headings = re.findall(r"^#+ `([\w.]+)`$", text, re.M)
    assert set(headings) >= {*(f"ps.{name}" for name in paramserve.__all__), *BESIDE_NAMES}
    loader = text.partition("#### `Worker.loader`")[2].partition("####")[0]
    for part in ("epochs: int = 1", "- `dataloader_options`: as", "- `TypeError`: an unknown"):
        assert part in loader
    for named in (
        "#### `Loader.epochs`",
        "- `buffers`:",
        "- `clip_norm`:",
        "#### `Worker.all_reduce`",
        "`observe.watch`",
    ):
        assert named in text


@each_case("kind", sorted(errors.KINDS))
def test_error_has_a_section_with_cause_and_cure_which_its_text_names(kind: str) -> None:
    text = write_api.REFERENCE.read_text()
    told = str(errors.KINDS[kind]("it failed", fix="try again"))
    (anchor,) = re.findall(r" More: docs/reference\.md#([\w-]+)$", told)
    (section,) = (
        each for each in text.split("\n### ") if write_api.anchor(each.partition("\n")[0]) == anchor
    )
    assert section.startswith(("`ps.errors.", "`ps.ParamServeError"))
    for part in ("Cause", "Cure"):
        (words,) = re.findall(rf"^\*\*{part}\*\*: (.+)$", section, re.MULTILINE)
        assert words in TROUBLES.read_text().replace("](#", "](troubleshooting.md#")


def test_error_of_a_users_own_class_names_the_section_of_its_base() -> None:
    class MyTimeout(errors.PushTimeout):
        pass

    told = str(MyTimeout("it failed", fix="try again"))
    assert told == str(errors.PushTimeout("it failed", fix="try again"))


def test_pages_are_not_written_with_an_error_that_no_row_explains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fewer = tmp_path / "troubleshooting.md"
    lines = TROUBLES.read_text().splitlines(keepends=True)
    fewer.write_text("".join(line for line in lines if not line.startswith("| `RankTaken`")))
    monkeypatch.setattr(write_api, "TROUBLES", fewer)
    with pytest.raises(ValueError, match="has 0 rows that explain RankTaken"):
        write_api.reference()


@each_case(
    ("owner", "name"),
    [(paramserve, "run"), (paramserve, "Sync"), (errors.KINDS, "NameTaken")],
    ids=["function", "dataclass", "error"],
)
def test_pages_are_not_written_with_a_name_without_a_docstring(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    thing = owner[name] if isinstance(owner, dict) else getattr(owner, name)
    invented = f"{name}()" if name == "Sync" else ""  # as dataclass makes one
    monkeypatch.setattr(thing, "__doc__", invented)
    with pytest.raises(ValueError, match=rf"without a docstring: ps\.(errors\.)?{name}$"):
        write_api.index()


def test_pages_are_not_written_with_a_method_without_a_docstring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paramserve.Worker.log, "__doc__", None)
    with pytest.raises(ValueError, match=r"without a docstring: ps\.Worker\.log$"):
        write_api.reference()


def test_readme_make_targets_and_variables_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z]+)", README.read_text())) - {"and"}:
        assert re.search(rf"^{target}:", makefile, re.M), f"make {target}"
    for variable in set(re.findall(r"\b([A-Z]+)=", README.read_text())):
        assert re.search(rf"^{variable} \?=", makefile, re.M), variable
