"""Who imports whom, read from the source: what each folder of docs/architecture.md may import."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import safe_offload

ROOT = Path(safe_offload.__file__).parent
FUNCTION_LINES_MAX = 70
MODULES_MAX = 12

ROOMS: dict[str, tuple[str, ...]] = {
    "config": (),
    "compat": ("config", "layout"),
    "observe": ("config", "protocol", "sides"),
    "start": ("compat", "config", "started", "worker/copies", "worker/memory"),
    "scheduler": (
        "compat",
        "observe",
        "protocol",
        "scheduler/cache",
        "scheduler/loads",
        "scheduler/stores",
        "scheduler/tiers",
        "sides",
    ),
    "scheduler/node": ("node", "observe", "scheduler/cache"),
    "scheduler/features": (
        "compat",
        "config",
        "node",
        "observe",
        "protocol",
        "scheduler",
        "scheduler/cache",
        "scheduler/loads",
        "scheduler/node",
    ),
    "scheduler/features/pins": ("observe", "scheduler", "scheduler/cache", "scheduler/tiers"),
    "node": ("mapped_files",),
    "scheduler/cache": ("compat", "config", "observe", "scheduler/eviction"),
    "scheduler/eviction": (),
    "scheduler/loads": ("compat", "observe", "protocol", "scheduler", "scheduler/cache"),
    "scheduler/stores": (
        "compat",
        "observe",
        "protocol",
        "scheduler",
        "scheduler/cache",
        "scheduler/loads",
    ),
    "scheduler/tiers": (
        "config",
        "observe",
        "protocol",
        "scheduler",
        "scheduler/cache",
        "scheduler/loads",
    ),
    "worker": (
        "compat",
        "config",
        "event_loop",
        "layout",
        "mapped_files",
        "node",
        "observe",
        "protocol",
        "sides",
        "threads",
        "tiers",
        "tiers/namespace",
        "worker/copies",
        "worker/memory",
    ),
    "worker/memory": ("config", "layout", "mapped_files", "observe", "protocol"),
    "worker/copies": ("config", "layout", "protocol", "threads", "worker/memory"),
    "tiers": ("config", "event_loop", "findings", "layout", "mapped_files", "threads"),
    "tiers/namespace": ("compat", "config", "layout", "started"),
}
"""What each folder imports beside itself and errors: see the folder's own first lines."""

IMPORTS_VLLM = {
    "start/plugin.py": "registers the connector with vLLM",
    "observe/metrics.py": "base classes of statistics and metrics",
    "scheduler/requests.py": "RequestStatus",
    "scheduler/loads/hits.py": "its rule of full attention",
    "scheduler/blocks.py": "the blocks of its pool",
    "scheduler/cache/events.py": "hashes and extra keys as it publishes them",
    "commands/bench/engine_process.py": "runs an engine",
    "commands/doctor/probe.py": "asks what it makes of the arguments of `vllm serve`",
}
"""Files beside compat/ that import vLLM when they run, not only for types, and what for."""

PROBES_VLLM = {
    "scheduler/blocks.py": {
        "_block_hash",
        "cached_block_hashes_by_block",
        "has_positionally_stable_blocks",
    },
    "tiers/namespace/engine_facts.py": {"__dict__", "to_dict", "to_json_string"},
    "tiers/namespace/namespace_facts.py": {
        *("calculate_kv_scales", "draft_model_config", "model_weights", "resolved")
    },
    "scheduler/features/pins/hints.py": {"kv_hints"},
    "scheduler/loads/cost.py": {"has_sync_kv_loads"},
    "scheduler/stores/eager.py": {"kv_connector_block_state", "boundary_state_offloads"},
    "scheduler/stores/policy.py": {"num_publishable_block_hashes"},
}
"""Attributes that these files, beside compat/, take only from a vLLM that has them."""


FIELDS_OF_VLLM = {
    *("finished_recving", "finished_sending", "kv_transfer_config", "block_size"),
    *("max_num_batched_tokens", "num_computed_tokens", "num_gpu_blocks", "policy", "rank"),
    "world_size",
}
"""Fields of vLLM's objects that we set, and that classes of ours have too."""

SLOTS = {
    "scheduler/cache/events.py": {"num_learned"},
    "scheduler/features/pins/pins.py": {"pins"},
    "scheduler/features/tenants.py": {"num_requested"},
    "scheduler/loads/admission.py": {"need"},
    "scheduler/loads/boundaries.py": {"marks", "boundary"},
    "scheduler/outdated.py": {"outdated"},
    "scheduler/stores/eager.py": {"eager"},
    "scheduler/stores/extras.py": {"extras"},
    "scheduler/stores/lazy.py": {"left_out_from"},
    "scheduler/stores/policy.py": {"tables", "is_decoding", "num_computed", "snapshots"},
    "scheduler/stores/stores.py": {"prefix", "loaded", "num_parts", "left_over"},
    "scheduler/tiers/lookups.py": {"lookup"},
    "scheduler/features/private_blocks.py": {"private"},
}
"""The slots of a `RequestState`, by the file that fills them."""
BODY = "scheduler/requests.py"
"""It names, for types only, what fills the slots of a request, and what fills them knows it."""

NAMES_OF_OTHERS = {"_replace", "_exit", "_preempt_request"}
"""Of named tuples, of os, and of vLLM's scheduler."""
READS_PRIVATE = {
    "engine/children/held_stores.py": ("_run",),  # holds the copies of a real worker
    "engine/children/poisoned.py": ("_run",),  # lets copies fail, or leave out a block
    "engine/faulty.py": ("_run",),  # lets the copies of a real server fail
    "gpu/weights.py": ("_add",),  # spoils a real load, of either kind
    "gpu/small.py": ("_answer_calls",),  # of engines that first cache prefixes of MLA, too
    "node/test_dead.py": ("_engines",),  # damages what a row of a table says
    "node/test_lots.py": ("_are_held",),  # an owner sees a guest too late
    "node/test_table.py": ("_engines", "_mapping", "_tokens"),  # flips each bit of a table
    "scheduler/loads/test_admission.py": ("_by_missing",),  # the bound of a heap
    "scheduler/loads/test_shared_loads.py": ("_loads", "_marks", "_shared_loads"),  # are left empty
    "scheduler/test_growth.py": ("_counts", "_first", "_stretches"),  # of pins, which are a tree
    "scheduler/test_failures.py": ("_kv_cache_config",),  # of vLLM's base class
    "simulator/test_runs.py": ("_settle",),  # steps before a reset, which raise
    "test_connector.py": ("_counters",),  # errors that hooks contain before there is a planner
    "tiers/mooncake/test_trouble.py": ("_process",),  # that a client has started
    "tiers/process/test_ends.py": ("_answers", "_setup", "_start"),  # sees calls, lets starts hang
    "worker/memory/test_shared_memory.py": ("_map",),  # is made to fail
}
"""Private fields and methods of ours, by name, that tests, the simulator and benchmarks read."""


def _files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py"))


FILES = _files()
SCHEDULER = [name for name in FILES if name.startswith("scheduler/")]
COMPAT = [name for name in FILES if name.startswith("compat/")]
WORKER = [name for name in FILES if name.startswith(("worker/", "tiers/"))]


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(), name)


def _module_of(name: str) -> str:
    """The dotted name of a file of the package."""
    parts = ["safe_offload", *Path(name).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILE_OF = {_module_of(name): name for name in FILES}


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def _walk(
    node: ast.AST, *, with_types: bool, with_functions: bool
) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if (with_types or not _is_for_types(child)) and (with_functions or not is_function):
            yield from _walk(child, with_types=with_types, with_functions=with_functions)


@functools.cache
def imports_of(
    name: str, *, with_types: bool = True, with_functions: bool = True
) -> frozenset[str]:
    """Dotted names that a file imports; `from a import b` is both `a` and `a.b`."""
    found: set[str] = set()
    for node in _walk(tree_of(name), with_types=with_types, with_functions=with_functions):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{name}: relative imports hide who imports whom"
            assert node.module is not None
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def _imports(name: str, package: str) -> set[str]:
    """What a file imports of a package, for types or inside functions too."""
    return {i for i in imports_of(name) if i == package or i.startswith(f"{package}.")}


def _loaded_with(name: str) -> set[str]:
    """Files of the package that are imported when this one is."""
    seen, left = set(), [name]
    while left:
        current = left.pop()
        if current in seen:
            continue
        seen.add(current)
        for module in imports_of(current, with_types=False, with_functions=False):
            parts = module.split(".")
            packages = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
            left += [FILE_OF[package] for package in packages if package in FILE_OF]
    return seen


# ---- folders are processes ---------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULER)
def test_the_scheduler_side_imports_neither_torch_nor_asyncio_nor_the_worker(name):
    for package in ("torch", "asyncio", "threading", "time", "safe_offload.worker"):
        assert not _imports(name, package)


@pytest.mark.parametrize("name", ["connector.py", *SCHEDULER])
def test_the_scheduler_side_does_not_load_the_worker_by_way_of_others(name):
    loaded = _loaded_with(name)
    assert not [other for other in loaded if other.startswith("worker/")]
    for other in loaded:
        imported = imports_of(other, with_types=False, with_functions=False)
        assert not {"torch", "asyncio"} & imported, f"{name} loads {other}"


@pytest.mark.parametrize("name", WORKER)
def test_the_worker_side_does_not_load_the_scheduler_by_way_of_others(name):
    assert not [other for other in _loaded_with(name) if other.startswith("scheduler/")]


def test_errors_import_nothing():
    assert not imports_of("errors.py") - {"__future__", "__future__.annotations"}


def _loaded_elsewhere(name: str, *rooms: str) -> set[str]:
    return {other for other in _loaded_with(name) if not other.startswith(rooms)}


def test_settings_and_layout_do_without_torch_and_vllm():
    for name in ("config/options.py", "layout.py"):
        assert _loaded_elsewhere(name, "config/") <= {name, "__init__.py", "errors.py"}
        assert not _imports(name, "vllm")
        assert not _imports(name, "torch")


def test_what_vllm_loads_in_every_process_is_light():
    assert _loaded_elsewhere("start/plugin.py", "start/", "config/") == {
        *("__init__.py", "errors.py", "started.py", "compat/__init__.py"),
        *("compat/media_ids.py", "compat/whole_blocks.py", "compat/wrapping.py"),
    }
    for name in _loaded_with("start/plugin.py"):
        imported = imports_of(name, with_types=False, with_functions=False)
        assert not [i for i in imported if i.split(".")[0] in ("vllm", "torch", "numpy")]


def _room_of(name: str) -> str:
    """Return the room of a file: the deepest folder of `ROOMS` that it lies in, or itself."""
    folder = Path(name).parent
    for room in (folder, *folder.parents):
        if str(room) in ROOMS:
            return str(room)
    return str(folder) if str(folder) != "." else name.removesuffix(".py")


def _rooms_imported(room: str) -> set[str]:
    files = [name for name in FILES if _room_of(name) == room]
    return {_room_of(other) for name in files for other in _ours(name)} - {room}


@pytest.mark.parametrize("room", ROOMS)
def test_a_folder_imports_what_its_first_lines_say(room):
    assert _rooms_imported(room) - {"__init__", "errors"} == set(ROOMS[room])


def test_no_folder_has_more_than_twelve_modules():
    modules = [name for name in FILES if not name.endswith("__init__.py")]
    folders = Counter(str(Path(name).parent) for name in modules)
    assert {folder: n for folder, n in folders.items() if n > MODULES_MAX} == {}


def _feature_of(name: str) -> str:
    """The feature that a file belongs to: a file or a folder in features/; else nothing."""
    feature = name.removeprefix("scheduler/features/")
    return "" if feature == name else feature.partition("/")[0]


def test_features_know_no_other_feature_and_only_one_file_names_them():
    named_by = {
        name: {_feature_of(other) for other in _ours(name)} - {"", _feature_of(name)}
        for name in FILES
    }
    assert {name for name, named in named_by.items() if named} == {"compose.py"}


def test_no_class_is_made_at_run_time():
    for name in SCHEDULER:
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "type" or len(node.args) == 1, name


def _classes_named_in(name: str) -> dict[str, tuple[str, str]]:
    """By local name, the file and name of each class of the scheduler that a file has."""
    found = {}
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.ClassDef):
            found[node.name] = name, node.name
        elif isinstance(node, ast.ImportFrom) and node.module in FILE_OF:
            for alias in node.names:
                found[alias.asname or alias.name] = FILE_OF[node.module], alias.name
    return found


def _made_in(tree: ast.AST) -> Iterator[str]:
    """Names that are called, or chosen to be called."""
    for node in ast.walk(tree):
        found: list[ast.expr | None] = []
        if isinstance(node, ast.Call):
            found = [node.func]
        elif isinstance(node, ast.Dict):
            found = [*node.values]
        elif isinstance(node, ast.IfExp):
            found = [node.body, node.orelse]
        yield from (each.id for each in found if isinstance(each, ast.Name))


def test_no_class_of_either_side_inherits_from_one_that_is_made_itself():
    bases: dict[tuple[str, str], set[str]] = defaultdict(set)
    made: set[tuple[str, str]] = set()
    for name in FILES:
        classes = _classes_named_in(name)
        made.update(classes[value] for value in _made_in(tree_of(name)) if value in classes)
        for node in ast.walk(tree_of(name)):
            for base in node.bases if isinstance(node, ast.ClassDef) else ():
                if isinstance(base, ast.Name) and base.id in classes:
                    bases[classes[base.id]].add(name)
    assert {
        ("scheduler/cache/slots.py", "SlotPool"),
        ("scheduler/eviction/policy.py", "Lru"),
    } <= made
    assert ("scheduler/eviction/policy.py", "EvictionPolicy") in bases
    sides = "scheduler/", "worker/", "node/"
    found = {base for base in made & bases.keys() if base[0].startswith(sides)}
    assert found == set()


# ---- one owner for each fact -------------------------------------------------------------------


def _ours(name: str) -> set[str]:
    """Files of the package that a file imports, for types or inside functions too."""
    modules = imports_of(name, with_types=name != BODY)
    return {FILE_OF[module] for module in modules if module in FILE_OF}


def _reached_from(name: str) -> set[str]:
    seen: set[str] = set()
    left = _ours(name) - {"__init__.py"}
    while left:
        current = left.pop()
        seen.add(current)
        left |= _ours(current) - seen
    return seen


def test_no_files_import_one_another_in_a_circle():
    """For types or inside functions neither."""
    reached = {name: _reached_from(name) for name in FILES}
    circles = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in FILES
        if name in reached[name]
    }
    assert not circles


def _fields(name: str) -> set[str]:
    """Fields of the classes of a file: annotated in the class, or assigned to self."""
    found = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.ClassDef):
            annotated = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
            found |= {target.id for target in annotated if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and _is_written(node) and _is_self(node.value):
            found.add(node.attr)
    return found


def _is_written(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store | ast.Del)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


FIELDS = {name: _fields(name) for name in FILES}


@pytest.mark.parametrize("name", FILES)
def test_no_field_is_assigned_outside_the_file_of_its_class(name):
    """A field is told by its name: of a class of this file, or else of another file's."""
    elsewhere = set().union(*(fields for other, fields in FIELDS.items() if other != name))
    assigned = {
        node.attr
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.Attribute) and _is_written(node) and not _is_self(node.value)
    }
    assert not (assigned & elsewhere) - FIELDS[name] - FIELDS_OF_VLLM - SLOTS.get(name, set())


def test_each_slot_of_a_request_is_filled_by_one_file():
    slots = [slot for filled in SLOTS.values() for slot in filled]
    assert len(set(slots)) == len(slots)
    assert set(slots) <= FIELDS[BODY]


def _private(tree: ast.Module) -> set[str]:
    """Private fields and methods of the classes of a file."""
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    names.update(function.name for function in functions)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_tests_read_no_private_field_but_those_that_are_listed():
    """A private name that a file has itself is its own."""
    ours = set().union(*(_private(tree_of(name)) for name in FILES))
    found = {}
    for path in Path(__file__).parent.rglob("*.py"):
        text = path.read_text()
        if not re.search(r"(?<!\bself)\._(?!_)", text):
            continue  # parsing all of them takes seconds
        tree = ast.parse(text)
        attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        own = {node.attr for node in attributes if _is_self(node.value)}
        own |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        others = {node.attr for node in attributes if not _is_self(node.value)}
        if read := others & ours - own - NAMES_OF_OTHERS:
            found[str(path.relative_to(Path(__file__).parent))] = tuple(sorted(read))
    assert found == READS_PRIVATE


# ---- vLLM in as few files as possible ----------------------------------------------------------


def test_vllm_is_imported_where_it_is_said_to_be():
    importing = {
        name
        for name in FILES
        for module in imports_of(name, with_types=False)
        if module.split(".")[0] == "vllm"
    }
    assert importing - set(COMPAT) == set(IMPORTS_VLLM)


@pytest.mark.parametrize("name", FILES)
def test_what_users_install_does_not_need_the_tests(name):
    assert not _imports(name, "tests")


@pytest.mark.parametrize("name", [name for name in WORKER if name != "worker/opening.py"])
def test_the_worker_knows_vllm_in_one_file(name):
    assert not _imports(name, "vllm")


def _asks_for_the_version(node: ast.AST) -> bool:
    if isinstance(node, ast.Try):
        imports = any(
            (isinstance(child, ast.ImportFrom) and (child.module or "").startswith("vllm"))
            or (isinstance(child, ast.Import) and any(a.name == "vllm" for a in child.names))
            for child in node.body
        )
        catches = any(
            handler.type is not None and "ImportError" in ast.unparse(handler.type)
            for handler in node.handlers
        )
        return imports and catches
    if isinstance(node, ast.Compare | ast.If | ast.IfExp | ast.Match):
        test = ast.unparse(getattr(node, "test", getattr(node, "subject", node)))
        return "vllm_version" in test or "TESTED_VERSIONS" in test or "vllm.__version__" in test
    return False


def test_one_folder_knows_what_differs_between_versions():
    asking = {
        name for name in FILES for node in ast.walk(tree_of(name)) if _asks_for_the_version(node)
    }
    assert asking
    assert asking <= set(COMPAT)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith("/__init__.py")])
def test_the_first_lines_of_a_folder_are_what_it_is_for_what_it_imports_and_its_door(name):
    """And there is nothing else in its `__init__`."""
    assert len(tree_of(name).body) == 1
    purpose, rest = (ast.get_docstring(tree_of(name)) or "").split("\n\n")
    assert purpose.endswith(".")
    assert "import" in rest.lower()
    doors = re.findall(r"`(\w+)[^`]*`", rest.partition("Door")[2])
    assert doors
    assert all((ROOT / Path(name).with_name(f"{door}.py")).exists() for door in doors)
    assert len(purpose.splitlines()) + len(rest.splitlines()) <= 3


def test_attributes_that_some_versions_lack_are_asked_for_where_it_is_said():
    probes: dict[str, set[str]] = {}
    for name in ["connector.py", *SCHEDULER, *WORKER]:
        for node in ast.walk(tree_of(name)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr")
                and isinstance(node.args[1], ast.Constant)
            ):
                probes.setdefault(name, set()).add(node.args[1].value)
    assert probes == PROBES_VLLM


LEAVES_SOMETHING_BEHIND = {"multiprocessing", "tempfile", "socket", "shutil", "subprocess"}
WRITES = {"write_text", "write_bytes", "mkdir", "makedirs", "memfd_create", "shm_open", "mkstemp"}
MAY_LEAVE = {
    # Memory without a name, and a socket without a file: the kernel has both as long as a process
    # has them (test_shared_memory.py kills one). Of multiprocessing the key is read.
    "worker/memory/shared_memory.py": {"socket", "multiprocessing"},
    "mapped_files.py": {"memfd_create"},
    # The port of metrics, open as long as the process lives.
    "observe/page_server.py": {"socket"},
    # A look whether a port is free.
    "start/checks.py": {"socket"},
    # A name for keeping a connection alive; sockets are the event loop's.
    "tiers/valkey/login.py": {"socket"},
    # A look whether there is a master; a process that ends with ours (test_trouble.py kills ours),
    # and what they share and say.
    "tiers/mooncake/client.py": {"socket", "multiprocessing"},
    "tiers/mooncake/helper.py": {"multiprocessing"},
    # A file without a name, for the keys that an operator looks at: as long as its process.
    "tiers/mooncake/mooncake_store.py": {"tempfile"},
    # A process that ends with ours (test_process_tier.py kills ours), and the connection to it.
    "tiers/process/child_process.py": {"subprocess"},
    "tiers/process/process_tier.py": {"socket", "multiprocessing"},
    "tiers/process/child.py": {"socket"},
    # A file tier is there to outlive the process, in the directory that the user names.
    "tiers/files/directory.py": {"mkdir"},
    # A folder of doctor's, to try the directory with, and deleted again.
    "tiers/files/diagnosis.py": {"tempfile"},
    # A pool is there to outlive its engines; `safe-offload cache` lists and removes it.
    "node/pools.py": {"mkdir", "write_text"},
    # What the next start need not read again, in a directory of ours; bounded.
    "tiers/namespace/kept_digests.py": {"makedirs"},
}
"""What these files may use all the same."""


@pytest.mark.parametrize(
    "name", [name for name in FILES if not name.startswith(("commands/", "__main__"))]
)
def test_nothing_is_made_that_outlives_the_process(name):
    """A crash leaves no named memory, file, socket or process (docs/guarantees.md: L4)."""
    allowed = MAY_LEAVE.get(name, set())
    modules = {module.split(".")[0] for module in imports_of(name)}
    assert modules & LEAVES_SOMETHING_BEHIND == allowed & LEAVES_SOMETHING_BEHIND
    calls = [node.func for node in ast.walk(tree_of(name)) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "open"]
    made = {call.attr for call in calls if isinstance(call, ast.Attribute) and call.attr in WRITES}
    assert made == allowed & WRITES


# ---- size and docstrings -----------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_module_says_what_it_is_for(name):
    assert ast.get_docstring(tree_of(name))


@pytest.mark.parametrize("name", FILES)
def test_a_function_fits_on_a_page(name):
    too_long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    }
    assert not too_long


def _is_private(node: ast.Module | ast.ClassDef) -> bool:
    return isinstance(node, ast.ClassDef) and node.name.startswith("_")


def _methods() -> set[tuple[str, str]]:
    """Class and name of each method that has a docstring."""
    classes = [n for name in FILES for n in ast.walk(tree_of(name)) if isinstance(n, ast.ClassDef)]
    return {
        (each.name, node.name)
        for each in classes
        for node in each.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node)
    }


DOCUMENTED = _methods()
OF_OTHERS = {"KVConnectorBase_V1", "asyncio.BufferedProtocol"}
"""Base classes whose methods are described where they come from."""


def _is_described_there(parent: ast.Module | ast.ClassDef, node: ast.AST) -> bool:
    """Whether a base class, or a protocol that the class names, says what a method does."""
    if not isinstance(parent, ast.ClassDef) or isinstance(node, ast.ClassDef):
        return False
    named = {ast.unparse(base) for base in parent.bases}
    named |= set(re.findall(r"`(\w+)`", (ast.get_docstring(parent) or "").partition("\n")[0]))
    return any((each, node.name) in DOCUMENTED or each in OF_OTHERS for each in named)


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("commands/bench/")])
def test_what_is_public_says_what_it_does(name):
    nodes = [
        node
        for parent in ast.walk(tree_of(name))
        if isinstance(parent, ast.Module | ast.ClassDef) and not _is_private(parent)
        for node in parent.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not _is_described_there(parent, node)
    ]
    assert not [node.name for node in nodes if not ast.get_docstring(node)]


# ---- how much is kept --------------------------------------------------------------------------

CONTAINERS = frozenset({"dict", "list", "set", "defaultdict", "Counter", "deque", "OrderedDict"})


def _keeps_containers(node: ast.ClassDef) -> bool:
    """Whether its `__init__` makes a container that objects of the class keep."""
    inits = [each for each in node.body if getattr(each, "name", "") == "__init__"]
    for assigned in (each for init in inits for each in ast.walk(init)):
        if not isinstance(assigned, ast.Assign | ast.AnnAssign):
            continue
        targets = assigned.targets if isinstance(assigned, ast.Assign) else [assigned.target]
        kinds = [getattr(assigned, "annotation", None), getattr(assigned.value, "func", None)]
        is_made = isinstance(assigned.value, ast.Dict | ast.List | ast.Set | ast.ListComp)
        names = {ast.unparse(kind).split("[")[0] for kind in kinds if kind is not None}
        if any(isinstance(each, ast.Attribute) for each in targets) and (
            is_made or names & CONTAINERS
        ):
            return True
    return False


def _has_fields_of_containers(node: ast.ClassDef) -> bool:
    """Whether it is a dataclass with a field that is a container, or has some in it."""
    fields = [each.annotation for each in node.body if isinstance(each, ast.AnnAssign)]
    named = (each for field in fields for each in ast.walk(field) if isinstance(each, ast.Name))
    is_dataclass = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
    return is_dataclass and any(each.id in CONTAINERS for each in named)


@pytest.mark.parametrize("room", ["scheduler", "node", "observe"])
def test_a_class_of_the_scheduler_side_says_how_much_it_keeps(room):
    classes = [
        node
        for path in sorted((ROOT / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and (_keeps_containers(node) or _has_fields_of_containers(node))
    ]
    assert classes
    silent = [node.name for node in classes if "Bound: " not in (ast.get_docstring(node) or "")]
    assert silent == []
