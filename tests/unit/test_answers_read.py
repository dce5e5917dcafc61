"""Reading answers out of responses: one table per style."""

from dataclasses import replace

import pytest

from megarl.answers.final import final_part
from megarl.answers.form import MAX_LENGTH
from megarl.answers.read import last_number, read_answer, read_answers
from megarl.answers.verdict import read_verdict
from megarl.settings import AnswersConfig
from megarl.types import Prompt, RolloutKey
from tests.unit.records import rollout

BOXED = AnswersConfig()
POLYNOMIAL = "+".join(f"{i}x^{{{i}}}" for i in range(2, 42))

BOXES = [
    ("\\boxed{10} is wrong. Corrected: \\boxed{12}", "12"),  # case-A15
    ("Thus \\boxed{315}.\n\n**Final Answer**\n\\boxed{315}", "315"),
    ("\\boxed{\\frac{\\sqrt{3}}{2}}", "\\frac{\\sqrt{3}}{2}"),
    ("\\boxed{\\left\\{ 1, \\frac{1}{2} \\right\\}}", "\\left\\{ 1, \\frac{1}{2} \\right\\}"),
    ("\\boxed{\\boxed{7}}", "7"),
    ("\\boxed{\\text{Answer: }\\boxed{7}}", "7"),
    ("\\fbox{3}", "3"),
    ("\\fbox{\\frac{1}{2}}", "\\frac{1}{2}"),
    ("\\boxed{1} then \\fbox{2}", "2"),
    ("\\framebox{3}", "3"),
    ("\\boxed {8}", "8"),
    ("\\boxed\n{8}", "8"),
    ("\\boxed 8 and", "8"),
    ("$\\boxed8$", "8"),
    ("$\\boxed -3$", "-3"),
    ("\\boxed \\frac{1}{2}.", "\\frac{1}{2}"),
    ("\\boxed 7. Then \\boxed{9}", "9"),
    ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
    ("\\boxed{x = 5}", "x = 5"),
    ("\\boxed{50\\%}", "50\\%"),
    ("\\boxed{14} in the \\boxed{} format", "14"),
    ("\\boxed{14} in the \\boxed{ } format", "14"),
    ("\\boxed{7}. No: \\boxed{1", None),
    ("\\boxed{\\frac{3}{", None),
    ("\\boxed{(1,2", None),
    ("\\boxed{}", None),
    ("\\boxed{\\text{ }}", None),
    ("\\boxed{\\text{}}", None),
    ("\\boxed{$$}", None),
    ("\\boxed", None),
    ("<think>\\boxed{3}</think> \\boxed{4}", "4"),
    ("<think>a</think><think>\\boxed{1}</think>\n\\boxed{6}", "6"),
    ("<think>\\boxed{3}", None),
    ("thought \\boxed{3} </think> none", None),
    ("<thinking>\\boxed{3}</thinking>\\boxed{4}", "4"),
    ("[THINK]\\boxed{3}[/THINK]\\boxed{4}", "4"),
    ("<|begin_of_thought|>\\boxed{3}<|end_of_thought|>\\boxed{4}", "4"),
    ("\\boxed{5}<|im_end|>", "5"),
    ("\\boxed{5}<|im_end|>\n<|im_start|>user\n\\boxed{9}", "5"),
    ("\\boxed{5}</s>\\boxed{6}", "5"),
    ("\\boxed{5}<|eot_id|>\\boxed{6}", "5"),
    ("\\boxed{5} Hope this helps! For example 7 is prime.", "5"),
    ('```python\nprint(f"\\\\boxed{{{x}}}")\n```\nOutput 5, so \\boxed{5}', "5"),
    ('So \\boxed{5}. In code:\n```python\nprint("\\\\boxed{6}")\n```', "5"),
    ("```python\nx = '\\boxed{1}'\n", None),
    ("```latex\n\\boxed{5}\n```", "5"),
    ("```\n\\boxed{1}\n``` \\boxed{2}", "2"),
    ("\\boxedx{1}", None),
    ("\\unboxed{1}", None),
    ("The answer is 12", None),
    ("", None),
    ("\\boxed{None}", "None"),
    ("\\boxed{10^{10^{10^{10}}}}", "10^{10^{10^{10}}}"),
    (f"so \\boxed{{{POLYNOMIAL}}}.", POLYNOMIAL),  # case-A11, verl 7440: no tail slice
    ("\\boxed{5}" + " and so on" * 500, "5"),
    ("\\boxed{" + "7" * (MAX_LENGTH + 1) + "}", None),
    ("\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
]

LETTERS = [
    ("The limit is \\boxed{\\langle E\\rangle \\gg \\Delta D}.\n\n**Answer: B**", "B"),
    ("The answer is B because a car moves.", "B"),
    ("\\boxed{C} is a good answer", "C"),
    ("\\boxed{d}", "D"),
    ("\\boxed{a}", "A"),
    ("\\boxed{(A)}", "A"),
    ("\\boxed{\\textbf{(C) } 30}", "C"),
    ("\\boxed{\\text{(D)}\\ 12}", "D"),
    ("\\boxed{C. 30}", "C"),
    ("\\boxed{C: a polygenic score}", "C"),
    ("\\boxed{\\text{D: A risk}}", "D"),
    ("\\boxed{B) 42}", "B"),
    ("\\boxed{\\text{Option C}}", "C"),
    ("\\boxed{\\text{A because vitamin D is low}}", "A"),
    ("\\boxed{\\text{A car}}", None),
    ("\\boxed{A, C}", None),
    ("\\boxed{A \\text{ and } C}", None),
    ("\\boxed{4}", None),
    ("\\boxed{E}", None),
    ("\\boxed{B", None),
    ("\\boxed{B}. Wait. \\boxed{D}", "D"),
    ("I rule out A and C. Final answer: \\boxed{D}", "D"),
    ("Answer: $\\text{B}$", "B"),
    ("Answer: (C)", "C"),
    ("ANSWER: C", "C"),
    ("**Answer:** C", "C"),
    ("Answer: **C**", "C"),
    ("Answer: C. Carbon", "C"),
    ("Answer: Carbon dioxide", None),
    ("The correct answer is **B**.", "B"),
    ("The answer is: \n\nB", "B"),
    ("The answer is $\\boxed{B}$", "B"),
    ("Answer: \\textbf{(D)}", "D"),
    ("The answer is D: none of the above", "D"),
    ("The answer is option A.", "A"),
    ("The answer is A", "A"),
    ("The answer is a car.", None),
    ("The answer is Albert", None),
    ("The answer is not B.", None),
    ("Answer: B or C", None),
    ("the answer is (b).", "B"),
    ("Therefore, C is the correct answer.", "C"),
    ("Option B is incorrect, so option C is correct.", "C"),
    ("A, B and D are wrong; the answer is C.", "C"),
    ("First I thought the answer is A. But the answer is C.", "C"),
    ("I would pick B \u2014 a safe choice.", "B"),
    ("I choose D.", "D"),
    ("(B)", "B"),
    ("B", "B"),
    ("b. 4", "B"),
    ("B) a long option", "B"),
    ("Some thoughts about a vitamin.\n\nC", "C"),
    ("Vitamin D is a good thing", None),
    ("No idea.", None),
    ("<think>Answer: A</think>Answer: B", "B"),
    ("Answer: B<|im_end|>Answer: C", "B"),
]

VERDICTS = [
    ("All steps hold. \\boxed{\\text{Correct}}", "correct"),
    ("\\boxed{Correct.}", "correct"),
    ("\\boxed{CORRECT}", "correct"),
    ("\\boxed{incorrect}", "incorrect"),  # case-I11
    ("\\boxed{\\text{Incorrect.}}", "incorrect"),
    ("\\boxed{wrong}", "incorrect"),
    ("\\boxed{\\text{not correct}}", "incorrect"),
    ("\\boxed{\\text{The answer is incorrect}}", "incorrect"),
    ("\\boxed{correct} ... no: \\boxed{incorrect}", "incorrect"),
    ("**\\boxed{correct}**", "correct"),
    ("I think the final value should be 12.", None),
    ("The given answer 12 is right. \\boxed{12}", None),
    ("It is correct.", None),
    ("\\boxed{incorrectly}", None),
    ("\\boxed{correct or incorrect}", None),
    ("\\boxed{}", None),
    ("\\boxed{correct", None),
    ("<think>\\boxed{correct}</think>", None),
]


@pytest.mark.parametrize(("text", "answer"), BOXES)
def test_boxed(text, answer):
    assert read_answer(text, BOXED) == answer


@pytest.mark.parametrize(("text", "answer"), LETTERS)
def test_letter(text, answer):
    assert read_answer(text, AnswersConfig(style="letter")) == answer


def test_letters_beyond_the_options_are_none():
    assert read_answer("\\boxed{E}", AnswersConfig(style="letter", options="ABCDE")) == "E"
    assert read_answer("Answer: C", AnswersConfig(style="letter", options="AB")) is None


@pytest.mark.parametrize(("text", "verdict"), VERDICTS)
def test_verdict_boxed(text, verdict):
    assert read_answer(text, AnswersConfig(style="verdict_boxed")) == verdict


@pytest.mark.parametrize(
    ("text", "verdict", "fallback"),
    [
        ("The answer is correct.", ("correct", True), None),
        ("Step 2 fails.\nThe answer is wrong.\n", ("wrong", True), None),
        ("The answer is correct.\nThe answer is wrong.", ("wrong", True), None),
        ("The answer is wrong.\nThe answer is correct.", ("correct", True), None),
        ("The answer is correct", (None, False), "correct"),
        ("The answer is correct. ", (None, False), "correct"),
        ("The answer is correct.\n\n", (None, False), "correct"),
        ("The answer is Correct.", (None, False), "correct"),
        ("**The answer is correct.**", (None, False), "correct"),
        ("The answer is incorrect.", (None, False), "wrong"),
        ("No mistake found in any step.", (None, False), "wrong"),
        ("", (None, False), "correct"),
        ("Looks good", (None, False), "correct"),
    ],
)
def test_v25_verdict_sentence(text, verdict, fallback):
    assert read_verdict(text) == verdict
    assert read_verdict(text, "keywords") == (verdict if verdict[1] else (fallback, False))
    assert read_answer(text, AnswersConfig(style="verdict_sentence")) == verdict[0]


def test_verifications_are_read_for_their_verdict():
    parent = RolloutKey("a", "q", "solve", None, 0)
    prompt = Prompt(agent="a", uid="q", role="verify", messages=(), n=3, parent=parent)
    texts = ["The answer is wrong.", "\\boxed{incorrect}", "\\boxed{7}"]
    seen = [replace(rollout(text=t, index=i), prompt=prompt) for i, t in enumerate(texts)]

    def verdicts(cfg):
        return [(r.answer, r.well_formed) for r in read_answers(seen, cfg)]

    assert verdicts(BOXED) == [("wrong", True), (None, False), (None, False)]
    assert verdicts(AnswersConfig(verdict="keywords")) == [("wrong", True), ("wrong", False), ("correct", False)]
    assert verdicts(AnswersConfig(verdict="boxed")) == [(None, False), ("wrong", True), (None, False)]


@pytest.mark.parametrize(
    ("text", "cfg", "answer"),
    [
        ("<think>x</think><answer>17</answer>", {"style": "tag"}, "17"),
        ("<answer>1</answer> <ANSWER> 2 </ANSWER>", {"style": "tag"}, "2"),
        ("<answer>\\boxed{3}</answer>", {"style": "tag"}, "3"),
        ("<answer>3", {"style": "tag"}, None),
        ("\\boxed{3}", {"style": "tag"}, None),
        ("48+24 = 72\n#### 1,072", {"style": "mark"}, "1072"),
        ("#### 1\n#### 2 apples", {"style": "mark"}, "2 apples"),
        ("no mark #### 2", {"style": "mark"}, None),
        ("<answer>17</answer>", {"fallback": ("tag",)}, "17"),
        ("\\boxed{5} <answer>17</answer>", {"fallback": ("tag",)}, "5"),
        ("\\boxed{5 <answer>17</answer>", {"fallback": ("tag",)}, None),
        ("#### 3", {"fallback": ("tag", "mark", "last-number")}, "3"),
        ("so 3", {"fallback": ("tag", "mark", "last-number")}, "3"),
        ("so 3", {}, None),
    ],
)
def test_tags_marks_and_fallbacks(text, cfg, answer):
    assert read_answer(text, AnswersConfig(**cfg)) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("a 3 then 1,072.", "1072"), ("5-3", "3"), ("= -3.5", "-3.5"), ("none", None), ("1,2", "2"),
        ("1234,567", "567"), ("about 2.5e3", "2.5e3"), ("\u0663", None), ("x = 7!", "7"), ("(-3)", "-3"),
    ],
)  # fmt: skip
def test_last_number(text, number):
    assert last_number(text) == number
    assert read_answer(text, AnswersConfig(style="last-number")) == number


def test_case_a13_cut_responses_do_not_vote():
    group = [rollout(index=i, text="early \\boxed{7}, but then", stop="length") for i in range(3)]
    group += [rollout(index=i, text="\\boxed{12}") for i in range(3, 8)]
    read = read_answers(group, BOXED)
    assert [r.answer for r in read] == [None] * 3 + ["12"] * 5 and not any(r.well_formed for r in read[:3])
    assert all(r.answer for r in read_answers(group, AnswersConfig(truncated="read")))
    aborted = [rollout(text="\\boxed{1}", stop="abort")]
    assert read_answers(aborted, AnswersConfig(truncated="read"))[0].answer is None


def test_final_part():
    assert final_part("a</think>b</s>c") == "b" and final_part("<think>") == "" and final_part("plain") == "plain"
