import msgspec
import pytest

from asyncrl.reward.scoring.functions import constant, exact, math_verify, reasoning_gym, regex


@pytest.mark.parametrize(
    ("options", "completion", "answer", "expected"),
    [
        ({}, " 42\n", "42", 1),
        ({}, "42", 42, 1),
        ({}, "42.0", "42", 0),
        ({}, "Forty two", "forty two", 0),
        ({}, "b", ["a", "b"], 1),
        ({"normalize": "none"}, " 42", "42", 0),
        ({"normalize": "text"}, "  Forty\n two ", "forty two", 1),
        ({"normalize": "number"}, "$1,234.50.", "1234.5", 1),
        ({"normalize": "number"}, "-0.0", "0", 1),
        ({"normalize": "number"}, "1e3", "1000", 1),
        ({"normalize": "number"}, "1e999999999999", "1000", 0),
        ({"normalize": "number"}, "12", "1,2", 0),
        ({"normalize": "number"}, "nan", "NaN", 1),
        ({"normalize": "number"}, "9" * 5000, "9", 0),
        ({"answer_key": "solution"}, "42", "42", 1),
    ],
)
def test_exact(options, completion, answer, expected):
    assert exact(**options)(completion=completion, row={options.get("answer_key", "answer"): answer}) == expected


GSM8K = r"####\s*(-?[\d.,]+)"


@pytest.mark.parametrize(
    ("options", "completion", "answer", "expected"),
    [
        ({"pattern": GSM8K}, "so #### 7\nno, #### 8", "8", 1),
        ({"pattern": GSM8K}, "so #### 7\nno, #### 8", "7", 0),
        ({"pattern": GSM8K, "match": "first"}, "so #### 7\nno, #### 8", "7", 1),
        ({"pattern": GSM8K}, "no answer", "7", 0),
        ({"pattern": GSM8K, "normalize": "number"}, "#### 1,000.", "1000", 1),
        ({"pattern": GSM8K, "answer_pattern": GSM8K}, "#### 5", "2 + 3 is #### 5", 1),
        ({"pattern": r"\d+"}, "is 12", "12", 1),
        ({"pattern": r"(a|b)(?P<answer>\d)"}, "b3", "3", 1),
        ({"pattern": r"<a>(.*?)</a>"}, "<a>1\n2</a>", "1\n2", 1),
        ({"pattern": r"x(\d)?"}, "x", "1", 0),
    ],
)
def test_regex(options, completion, answer, expected):
    assert regex(**options)(completion=completion, row={"answer": answer}) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("The answer is $\\frac{2}{4}$.", "\\frac{1}{2}", 1),
        ("\\boxed{0.5}", "1/2", 1),
        ("\\boxed{x(x+1)}", "x^2+x", 1),
        ("so it is 1,234", "1234", 1),
        ("\\boxed{3}", "$4$", 0),
        ("I do not know", "4", 0),
        ("", "4", 0),
        ("\\boxed{" * 30, "4", 0),
        ("\\boxed{7}", ["6", "7"], 1),
    ],
)
def test_math_verify(completion, answer, expected):
    assert math_verify()(completion=completion, row={"answer": answer}) == expected


def test_a_gold_answer_that_is_no_mathematics_is_an_error_and_not_a_zero():
    with pytest.raises(ValueError, match=r"row\['answer'\]"):
        math_verify()(completion="\\boxed{1}", row={"answer": "$$"})


@pytest.mark.parametrize("make", [exact, math_verify, lambda: regex(pattern="a")])
@pytest.mark.parametrize(
    ("row", "named"), [({"question": "?"}, r"has \['question'\]"), ({"answer": None}, "no answer")]
)
def test_a_row_without_an_answer_is_an_error(make, row, named):
    with pytest.raises(ValueError, match=named):
        make()(completion="a", row=row)


def test_a_gold_answer_that_the_pattern_misses_is_an_error():
    with pytest.raises(ValueError, match="answer_pattern"):
        regex(pattern=GSM8K, answer_pattern=GSM8K)(completion="#### 5", row={"answer": "5"})


@pytest.mark.parametrize(("task", "options"), [("chain_sum", {"min_terms": 2}), ("rearc", {})])
def test_reasoning_gym_scores_as_the_library_does(task, options):
    from reasoning_gym import create_dataset

    dataset = create_dataset(task, size=3, seed=3, **options)
    reward = reasoning_gym()
    for index, item in enumerate(dataset):
        row = {"task": task, "options": options, "item": item, "index": index, "size": 3, "seed": 3}
        # As the row arrives: without its tuples.
        row = msgspec.msgpack.decode(msgspec.msgpack.encode(row))
        answer = item["answer"]
        assert reward(completion=f"<answer>0</answer> no <answer>{answer}</answer>", row=row) == 1
        assert reward(completion=f" {answer}\n", row=row) == 1
        wrong = f"{answer}1"
        assert reward(completion=wrong, row=row) == dataset.score_answer(wrong, item) < 1


def test_reasoning_gym_scores_the_item_that_the_row_holds():
    item = {"question": "2 + 2 =", "answer": "4", "metadata": {}}
    row = {"task": "chain_sum", "options": {}, "item": item}
    assert reasoning_gym()(completion="4", row=row) == 1
    # What is made again is another item here, and not the one that was asked.
    assert reasoning_gym()(completion="4", row={**row, "index": 0, "size": 2, "seed": 1}) == 1


def test_reasoning_gym_refuses_a_row_of_another_source():
    with pytest.raises(ValueError, match="task, options, item"):
        reasoning_gym()(completion="1", row={"answer": "1"})


def test_constant_is_the_same_for_the_same_texts_and_spreads_over_others():
    assert constant()(prompt="p", completion="c") == 1.0
    reward = constant(value=0.5, spread=0.5)
    rewards = [reward(prompt="p", completion=str(number)) for number in range(200)]
    assert rewards == [reward(prompt="p", completion=str(number)) for number in range(200)]
    assert 0 <= min(rewards) < 0.1
    assert 0.9 < max(rewards) <= 1


@pytest.mark.parametrize(
    ("make", "options", "named"),
    [
        (exact, {"normalize": "upper"}, "none, strip, text, number"),
        (regex, {"pattern": "("}, "no regular expression"),
        (regex, {"pattern": "a", "answer_pattern": "["}, "answer_pattern"),
        (regex, {"pattern": "a", "match": "all"}, "first"),
        (constant, {"duration_s": -1}, "duration_s"),
    ],
)
def test_wrong_options_are_refused(make, options, named):
    with pytest.raises(ValueError, match=named):
        make(**options)
