"""torchvm tree: what it prints, and that it is what the ops and the oracle say."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from tests import oracle
from torchvm.tools.cli import app

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PARENTS = "-1,0,0,1,1,2"
TOKENS = ("--tokens", "The,cat,dog,sat,ran,ran", "--target", "dog,x,ran,x,x,home")

WHOLE = """\
6 nodes, node 0 the root, behind 4 committed tokens: n = 6, L = 4

0 'The' *
├─ 1 'cat'
│  ├─ 3 'sat'
│  └─ 4 'ran'
└─ 2 'dog' *
   └─ 5 'ran' *

* accepted

mask: row i has ■ in column j where node i attends node j; every row attends the L committed tokens

   0 1 2 3 4 5
0  ■ · · · · ·
1  ■ ■ · · · ·
2  ■ · ■ · · ·
3  ■ ■ · ■ · ·
4  ■ ■ · · ■ ·
5  ■ · ■ · · ■

node         parent  position  retrieve_index  retrieve_next_token  retrieve_next_sibling
   0  'The'    root         4               0                    1                     -1
   1  'cat'       0         5               1                    3                      2
   2  'dog'       0         5               2                    5                     -1
   3  'sat'       1         6               3                   -1                      4
   4  'ran'       1         6               4                   -1                     -1
   5  'ran'       2         6               5                   -1                     -1

accepted: 0 2 5 (verify_tree_greedy)
  at node 0 the target's token is 'dog'
    retrieve_next_token 1 'cat': no
    retrieve_next_sibling 2 'dog': accepted
  at node 2 the target's token is 'ran'
    retrieve_next_token 5 'ran': accepted
  at node 5 the target's token is 'home'
    retrieve_next_token -1: the end
  the step yields 2 draft tokens and the bonus token 'home'

FULL_MASK: 60 bytes, bool, 10 a row
cell (i, j) is byte 10 * i + 4 + j
so cell (3, 1) is byte 10 * 3 + 4 + 1 = 35: 01
the 4 prefix cells of a row come first, all 01
mask_convert makes these bytes of the QLEN_ONLY mask, too

node  at byte  prefix       cells 0 to 5
   0        0  01 01 01 01  01 00 00 00 00 00
   1       10  01 01 01 01  01 01 00 00 00 00
   2       20  01 01 01 01  01 00 01 00 00 00
   3       30  01 01 01 01  01 01 00 01 00 00
   4       40  01 01 01 01  01 01 00 00 01 00
   5       50  01 01 01 01  01 00 01 00 00 01

QLEN_ONLY: 36 bytes, bool, 6 a row
cell (i, j) is byte 6 * i + j
so cell (3, 1) is byte 6 * 3 + 1 = 19: 01

node  at byte  cells 0 to 5
   0        0  01 00 00 00 00 00
   1        6  01 01 00 00 00 00
   2       12  01 00 01 00 00 00
   3       18  01 01 00 01 00 00
   4       24  01 01 00 00 01 00
   5       30  01 00 01 00 00 01

QLEN_ONLY_BITPACKING: 6 bytes, uint8, 1 a row
cell (i, j) is bit j % 8 of byte 1 * i + j // 8, where bit 7 is written first
so cell (3, 1) is bit 1 of byte 3, which is 00001011: 1
mask_convert makes these bytes of the QLEN_ONLY mask, too

node  at byte  hex    7..0
   0        0  01   00000001
   1        1  03   00000011
   2        2  05   00000101
   3        3  0b   00001011
   4        4  13   00010011
   5        5  25   00100101
"""


def drawn(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["tree", *arguments])
    assert done.exit_code == 0, (done.stderr, done.exception)
    assert done.stderr == ""
    return done.stdout


def found(*arguments: str) -> Any:
    return json.loads(drawn(*arguments, "--json"))


def test_all_of_it() -> None:
    assert drawn("--parents", PARENTS, *TOKENS, "--mode", "all") == WHOLE


def test_json_of_tokens_that_are_no_text() -> None:
    nodes = found("--parents", "-1,0", "--tokens", "\udcff,é")["nodes"]
    assert [node["token"] for node in nodes] == ["\udcff", "é"]


def test_json() -> None:
    node = {"path": None, "retrieve_next_sibling": -1, "accepted": True}
    assert found("--parents", "-1,0", "--accepted", "0,1", "--mode", "packed") == {
        "num_draft_tokens": 2,
        "seq_len": 4,
        "source": None,
        "nodes": [
            node
            | {"node": 0, "token": None, "parent": -1, "hangs_from": None, "position": 4}
            | {"retrieve_index": 0, "retrieve_next_token": 1, "attends": [0]},
            node
            | {"node": 1, "token": None, "parent": 0, "hangs_from": 0, "position": 5}
            | {"retrieve_index": 1, "retrieve_next_token": -1, "attends": [0, 1]},
        ],
        "accepted": [0, 1],
        "accepted_by": "given",
        "walk": [
            {"node": 0, "target": None, "tried": [1], "accepted": 1},
            {"node": 1, "target": None, "tried": [], "accepted": None},
        ],
        "nbytes": {"FULL_MASK": 12, "QLEN_ONLY": 4, "QLEN_ONLY_BITPACKING": 2},
        "layouts": [
            {
                "mode": "QLEN_ONLY_BITPACKING",
                "dtype": "uint8",
                "nbytes": 2,
                "cell_bits": 1,
                "row_bytes": 1,
                "prefix_bytes": 0,
                "prefix_is_ones": True,
                "prefix_is_cut": False,
                "same_by_mask_convert": True,
                "rows": [
                    {"first_byte": 0, "prefix": "", "tree": "01"},
                    {"first_byte": 1, "prefix": "", "tree": "03"},
                ],
            }
        ],
        "notes": [],
    }


def test_parts_are_those_of_the_whole() -> None:
    shown = drawn("--parents", PARENTS, *TOKENS, "--only", "mask", "--only", "walk")
    start, walk = WHOLE.index("mask:"), WHOLE.index("accepted: 0 2 5")
    mask = WHOLE[start : WHOLE.index("node  ", start)]
    assert shown == mask + WHOLE[walk : WHOLE.index("\nFULL_MASK")]


def test_plain_characters_where_the_encoding_has_no_others() -> None:
    arguments = ["tree", "--parents", "-1,0,0,1", "--tokens", "é,b,c,d", "--accepted", "0,1"]
    done = CliRunner(charset="ascii").invoke(app, [*arguments, "--only", "tree", "--only", "mask"])
    assert done.stderr == ""
    assert done.stdout == (
        "4 nodes, node 0 the root, behind 4 committed tokens: n = 4, L = 4\n"
        "\n"
        "0 '\\xe9' *\n"
        "|- 1 'b' *\n"
        "|  `- 3 'd'\n"
        "`- 2 'c'\n"
        "\n"
        "* accepted\n"
        "\n"
        "mask: row i has # in column j where node i attends node j; "
        "every row attends the L committed tokens\n"
        "\n"
        "   0 1 2 3\n"
        "0  # . . .\n"
        "1  # # . .\n"
        "2  # . # .\n"
        "3  # # . #\n"
    )


def test_malformed_parents_are_pointed_out() -> None:
    shown = drawn("--parents", "-1,0,3,9,4,2,-7,-8", "--only", "tree", "--only", "notes")
    alone = "attends the root and itself alone, and no list of children has it"
    assert shown == (
        "8 nodes, node 0 the root, behind 4 committed tokens: n = 8, L = 4\n"
        "\n"
        "0\n"
        "└─ 1\n"
        "\n"
        "hanging from nobody:\n"
        "2\n"
        "└─ 5\n"
        "3\n4\n6\n7\n"
        "\n"
        "note: node 2: parent 3 does not come before it, so it is not found: "
        f"it hangs from nobody, {alone}\n"
        f"note: node 3: parent 9 is no node, so it is not found: it hangs from nobody, {alone}\n"
        "note: node 4: parent 4 is the node itself, so it is not found: "
        f"it hangs from nobody, {alone}\n"
        f"note: node 6: parent -7 is no node, so it is not found: it hangs from nobody, {alone}\n"
        f"note: node 7: parent -8 is no node, so it is not found: it hangs from nobody, {alone}\n"
    )
    assert "note: nodes 1 to 3: parent -1 is no node, so it is not found: they hang" in drawn(
        "--parents", "-1,-1,-1,-1"
    )


@pytest.mark.parametrize("n", [1, 2, 8, 9, 17, 33, 70])
def test_the_picture_is_what_the_oracle_says(n: int) -> None:
    """Also for parents that are missing, themselves or later."""
    rng = random.Random(n)  # noqa: S311
    parents = [-1, *(rng.randint(-1, i) for i in range(1, n))]
    length = rng.choice([0, 5, 300])
    tree = oracle.tree(oracle.parents_of_nodes(parents), n - 1)
    given = ",".join(map(str, parents))
    picture = found("--parents", given, "--seq-len", str(length), "--mode", "all")
    nodes = picture["nodes"]
    assert [node["hangs_from"] for node in nodes] == tree.parents
    assert [node["position"] - length for node in nodes] == tree.depths
    assert [node["retrieve_next_token"] for node in nodes] == tree.next_token
    assert [node["retrieve_next_sibling"] for node in nodes] == tree.next_sibling
    assert [[j in node["attends"] for j in range(n)] for node in nodes] == tree.rows
    for mode, layout in enumerate(picture["layouts"]):
        cells = oracle.mask([tree], [length], mode, fill_prefix=True).cells
        assert layout["nbytes"] == len(cells) == picture["nbytes"][layout["mode"]]
        assert layout["prefix_is_ones"] is layout["same_by_mask_convert"] is True
        for row in layout["rows"]:
            start = row["first_byte"] + layout["prefix_bytes"]
            written = cells[start : start + layout["row_bytes"]]
            assert row["tree"] == bytes(written).hex(" ")
    shown = drawn("--parents", given)
    assert ("hanging from nobody" in shown) == (None in tree.parents[1:])


@pytest.mark.parametrize("seed", range(5))
def test_the_walk_is_what_the_oracle_says(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311
    n = rng.randint(1, 20)
    parents = [-1, *(rng.randrange(i) for i in range(1, n))]
    words = [[rng.randrange(2) for _ in range(n)] for _ in range(2)]
    tree = oracle.tree(oracle.parents_of_nodes(parents), n - 1)
    verified = oracle.verify_greedy(
        [words[0]], [list(range(n))], [tree.next_token], [tree.next_sibling], [words[1]], n
    )
    (index,) = verified["accept_index"]
    assert isinstance(index, list)
    options = [",".join(map(str, row)) for row in (parents, *words)]
    picture = found("--parents", options[0], "--tokens", options[1], "--target", options[2])
    assert picture["accepted"] == [node for node in index if node >= 0]
    assert [visit["target"] for visit in picture["walk"]] == [
        str(words[1][node]) for node in picture["accepted"]
    ]


def test_choices_are_numbered_as_medusa_does(tmp_path: Path) -> None:
    paths: list[list[int]] = [[1], [0, 1], [0], [0, 0], [2], [0, 0, 3]]
    picture = found("--choices", json.dumps(paths))
    assert [node["path"] for node in picture["nodes"]] == [
        [], [0], [1], [2], [0, 0], [0, 1], [0, 0, 3],
    ]  # fmt: skip
    assert [node["parent"] for node in picture["nodes"]] == [-1, 0, 0, 0, 1, 1, 4]
    (note,) = picture["notes"]
    assert note.startswith("the paths came in another order")
    file = tmp_path / "choices.py"
    file.write_text('"""Trees."""\nsmall = [(0,)]\nlarge = [(0,), (1,),\n  (0, 0)]\n')
    assert len(found("--choices", f"{file}:large")["nodes"]) == 4
    file.write_text("[[0], [1]]\n")
    picture = found("--choices", str(file))
    assert (len(picture["nodes"]), picture["notes"]) == (3, [])
    assert "1 [0]" in drawn("--choices", str(file))


def test_long_prefixes_are_cut_visibly() -> None:
    shown = drawn("--parents", "-1,0", "--seq-len", "1Mi", "--mode", "full", "--only", "bytes")
    assert shown == (
        "FULL_MASK: 2,097,156 bytes, bool, 1,048,578 a row\n"
        "cell (i, j) is byte 1048578 * i + 1048576 + j\n"
        "so cell (1, 0) is byte 1048578 * 1 + 1048576 + 0 = 2097154: 01\n"
        "the 1,048,576 prefix cells of a row come first, all 01; the first and last 3 are shown\n"
        "mask_convert makes these bytes of the QLEN_ONLY mask, too\n"
        "\n"
        "node    at byte  prefix                cells 0 to 1\n"
        "   0          0  01 01 01 .. 01 01 01  01 00\n"
        "   1  1,048,578  01 01 01 .. 01 01 01  01 01\n"
    )


def test_text_of_tokens_is_shown_escaped_and_aligned() -> None:
    texts = ["日本", "a\nb", "\x1b[31m", "[bold]", "\u202e", "x" * 50, "a,b"]
    shown = drawn("--parents", "-1,0,0,0,0,0,0", "--tokens", json.dumps(texts))
    for text in texts:
        assert repr(text) in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    table = shown[shown.index("node  ") :].splitlines()
    assert table[1].endswith(
        "root         4               0                    1" + " " * 21 + "-1"
    )
    # The wide characters take two columns each.
    assert len(table[1]) == len(table[2]) - 2
    assert table[6].startswith("   5  'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…")


def test_a_chain_of_sixty_is_narrow() -> None:
    shown = drawn(
        "--parents", ",".join(map(str, range(-1, 59))), "--only", "tree", "--only", "mask"
    )
    lines = shown.splitlines()
    assert lines[2:5] == ["0", "└1", " └2"]
    assert lines[61] == " " * 58 + "└59"
    assert lines[-1] == "59  " + "■" * 60
    assert lines[66] == "    " + "".join(str(j % 10) for j in range(60))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parents", "0,0"), "--parents must begin with -1, the root's own entry, got 0"),
        (("--parents", "-1,x"), "--parents must be whole numbers of 64 bits with commas"),
        (("--parents", "-1,9223372036854775808"), "got '9223372036854775808'"),
        (("--parents", ",".join(["-1"] * 1025)), "must be of at most 1,024 nodes, got 1,025"),
        (("--choices", "[[0],[1,0]]"), "beginning of every path: [1, 0] needs [1]"),
        (("--choices", "[[0],[0]]"), "must hold every path once, got [0] twice"),
        (("--choices", "[[]]"), "a list of at least one number; the root has none. Got []"),
        (("--choices", "[[-1]]"), "must be whole numbers from 0 on, got [-1]"),
        (("--choices", "[" * 5000), "must be a JSON or Python list of lists of numbers"),
        (("--choices", "[f(0)]"), "--choices must be a list of lists of numbers"),
        (("--choices", "x" * 5000), "File name too long"),
        (("--choices", "."), "cannot read --choices .: Is a directory"),
        (("--parents", "-1,0", "--tokens", "a"), "one for each of the 2 nodes, the root's first"),
        (("--parents", "-1,0", "--tokens", "[1"), "--tokens must be a JSON list of texts"),
        (("--parents", "-1,0", "--target", "a,b"), "--target needs --tokens"),
        (("--parents", "-1,0", "--accepted", "1"), "must begin with the root, 0, got 1"),
        (
            ("--parents", "-1,0,0", "--accepted", "0,1,2"),
            "each be a child of the one before: node 1 has none, got 2",
        ),
        (("--parents", "-1,0", "--accepted", "0,99"), "node 0 has 1, got 99"),
        (
            ("--parents", "-1,0", "--seq-len", "1Gi", "--mode", "all"),
            "FULL_MASK must be at most 256 MiB to be shown, got 2.00 GiB",
        ),
        (("--parents", "-1", "--seq-len", "2Ti"), "tokens must be at most 1,099,511,627,776"),
        (("--parents", "-1", "--step", "1"), "--step and --request are for a recording"),
        (("--parents", "-1", "--only", "bytes"), "--only bytes needs --mode"),
        (("--parents", "-1", "--only", "walk"), "--only walk needs --target, --accepted or"),
        (("--parents", "-1", "--only", "tree", "--json"), "leave --json out"),
        (("--parents", "-1", "--svg", "absent/x.svg"), "cannot write absent/x.svg"),
        (("--parents", "-1" + ",0" * 256, "--svg", "x.svg"), "at most 256 nodes, got 257"),
    ],
)
def test_mistakes_are_one_line_on_stderr(
    arguments: tuple[str, ...],
    message: str,
    mistake: Callable[..., str],
) -> None:
    assert message in mistake("tree", *arguments)


def test_files_of_choices_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "c"
    for content, name, message in (
        (b"", "", "must hold one list, or be given as FILE:NAME; it has none"),
        (b"\xff[[0]]", "", "it is not UTF-8 text"),
        (b"a = [[0]]\nb = 3", "", "must hold one list, or be given as FILE:NAME; it has a, b"),
        (b"a = [[0]]\nb = 3", ":c", "must give a list the name 'c'; it has a, b"),
        (b"a = [[0]]\nb = 3", ":b", "must be a list of lists of numbers, got 3"),
        (b"[[0], null]", "", "must be a list of lists of numbers"),
    ):
        file.write_bytes(content)
        done = CliRunner().invoke(app, ["tree", "--choices", f"{file}{name}"])
        assert message in str(done.exception)


def test_the_tree_comes_from_one_place() -> None:
    for arguments in ((), ("--parents", "-1", "--choices", "[]")):
        done = CliRunner().invoke(app, ["tree", *arguments])
        assert done.exit_code == 2
        assert "give one of --parents, --choices and --record" in done.stderr
