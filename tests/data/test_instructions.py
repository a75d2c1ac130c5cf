"""Instructions: which tokens are predicted, how texts are packed, and what is refused."""

import json

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import ByKey
from lightning_lowrank.data import AnsweredTexts, Instructions, PackTexts
from tests import texts

pytest.importorskip("transformers")

ROWS = [
    {"instruction": "a good film", "output": "the story is warm", "speaker": "ben"},
    {"instruction": "actors", "output": "bad", "speaker": "ada"},
    {"instruction": "with the film", "output": "and the actors", "speaker": "ben"},
]
END = texts.WORDS.index("[SEP]")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    return str(texts.save_language_model(tmp_path_factory.mktemp("language")))


def ids(text: str) -> list[int]:
    return [texts.WORDS.index(word) for word in text.split()]


def data_of(tokenizer, rows=ROWS, **arguments) -> Instructions:
    given = {"prompt": "is {instruction} and ", "validation": "train", **arguments}
    return Instructions(tokenizer=tokenizer, dataset={"train": rows}, **given)


def test_answers_and_their_end_are_predicted_and_nothing_else(tokenizer):
    data = data_of(tokenizer)
    data.setup("fit")
    for index, row in enumerate(ROWS):
        prompt, answer = ids(f"[CLS] is {row['instruction']} and"), [*ids(row["output"]), END]
        sample = data.train_set[index]
        assert sample["input_ids"].tolist() == prompt + answer
        assert sample["labels"].tolist() == [-100] * len(prompt) + answer
    batch = data.collate()([data.train_set[0], data.train_set[1]])
    assert batch["labels"][1].tolist() == [-100] * 4 + [*ids("bad"), END] + [-100] * 5
    assert batch["attention_mask"].tolist() == [[1] * 11, [1] * 6 + [0] * 5]
    assert batch["input_ids"][1, 6:].tolist() == [texts.PADDING] * 5
    indices = ByKey("speaker").split(data.train_set, clients=None, seed=0)
    assert [part.tolist() for part in indices] == [[1], [0, 2]]


def test_the_default_prompt_is_alpacas(tokenizer):
    data = Instructions(tokenizer=tokenizer, dataset={"train": ROWS}, validation="train")
    assert data.prompt.format(instruction="Sing.").endswith("### Instruction:\nSing.\n\n### Response: ")
    data.setup("fit")
    assert data.train_set[1]["labels"].tolist()[-2:] == [*ids("bad"), END]


def test_a_missing_value_is_no_word_of_a_prompt(tokenizer):
    rows = [{**ROWS[0], "speaker": value} for value in (None, float("nan"), "ada")]
    data = data_of(tokenizer, rows, prompt="is {speaker}")
    data.setup("fit")
    assert data.train_set[0]["input_ids"].tolist() == data.train_set[1]["input_ids"].tolist()
    assert len(data.train_set[2]["input_ids"]) == len(data.train_set[0]["input_ids"]) + 1


def test_the_assistants_words_are_predicted_in_every_turn(tokenizer):
    said = [("user", "a film"), ("assistant", "good"), ("user", "the actors"), ("assistant", "bad story")]
    whole = [{"role": role, "content": content} for role, content in said]
    shared = [{"from": {"user": "human", "assistant": "gpt"}[role], "value": content} for role, content in said]
    expected = ids("[CLS] is a film [SEP] and good [SEP] is the actors [SEP] and bad story [SEP]")
    answered = ids("good [SEP]"), ids("bad story [SEP]")
    labels = [-100] * 6 + answered[0] + [-100] * 5 + answered[1]
    for messages in (whole, shared):
        data = data_of(tokenizer, [{"chat": messages}], messages="chat", prompt=None)
        data.setup("fit")
        assert data.train_set[0]["input_ids"].tolist() == expected
        assert data.train_set[0]["labels"].tolist() == labels


def test_of_plain_texts_all_is_predicted(tokenizer):
    data = data_of(tokenizer, [{"line": "a film"}], text="line", prompt=None)
    data.setup("fit")
    assert data.train_set[0]["input_ids"].tolist() == [*ids("[CLS] a film"), END]
    assert data.train_set[0]["labels"].tolist() == [-100, *ids("a film"), END]


def test_long_texts_are_cut_off_and_those_without_an_answer_dropped(tokenizer):
    data = data_of(tokenizer, max_length=6)
    with pytest.warns(UserWarning, match="2 of 3 texts have nothing to predict within max_length=6"):
        data.setup("fit")
    assert [len(data.train_set), data.train_set["speaker"]] == [1, ["ada"]]
    with pytest.raises(MisconfigurationException, match="max_length=3"):
        data_of(tokenizer, max_length=3).setup("fit")


def test_a_share_is_held_back_to_validate_on(tmp_path, tokenizer):
    rows = [{"instruction": "a", "output": word} for word in texts.GOOD + texts.BAD + texts.OTHERS[:2]]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = Instructions(str(tmp_path), tokenizer, prompt="{instruction}", validation=0.2)
    data.setup()
    answers = [
        [part[index]["labels"][-2].item() for index in range(len(part))]
        for part in (data.train_set, data.validation_set, data.test_set)
    ]
    # Eight rows to train on and the other two, in the order of the file.
    told = ids(" ".join(row["output"] for row in rows))
    assert [len(each) for each in answers] == [8, 2, 2]
    assert answers[1] == answers[2]
    assert sorted(answers[0] + answers[1]) == sorted(told)
    assert all(each == sorted(each, key=told.index) for each in answers)
    assert answers[1] != told[8:]
    with pytest.raises(MisconfigurationException, match=r"validation=0\.5.*1"):
        data_of(tokenizer, ROWS[:1], validation=0.5).setup("fit")


@pytest.mark.parametrize(("written", "found"), [("0.1", 0.1), ("dev.jsonl", "dev.jsonl")])
def test_a_share_on_the_command_line_is_a_number(written, found):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Instructions, "data")
    assert parser.parse_args([f"--data.validation={written}"]).data.validation == found


@pytest.mark.parametrize(
    ("arguments", "rows", "message"),
    [
        ({"text": "line"}, ROWS, r"prompt='is \{instruction\} and '.*text='line'"),
        ({"prompt": "{} and"}, ROWS, r"prompt='\{\} and'.*\[''\]"),
        ({"prompt": "{a"}, ROWS, r"prompt='\{a'"),
        ({"validation": 1}, ROWS, r"validation.*1"),
        ({"validation": 1.5}, ROWS, r"validation.*1\.5"),
        ({"max_length": 600}, ROWS, r"max_length=600.*512"),
        ({"prompt": "{question}"}, ROWS, r"dataset.*'question'"),
        ({"answer": "reply"}, ROWS, r"dataset.*'reply'"),
        ({}, [{"instruction": "a", "output": None}], r"dataset.*0"),
        ({"prompt": None, "messages": "chat"}, [{"chat": "a film"}], r"dataset.*0.*'a film'"),
        ({"prompt": None, "messages": "chat"}, [{"chat": [{"role": "user"}]}], r"dataset.*0"),
    ],
)
def test_what_cannot_be_read_is_named(tokenizer, arguments, rows, message):
    with pytest.raises(MisconfigurationException, match=message):
        data_of(tokenizer, rows, **arguments).setup("fit")


def test_a_tokenizer_without_what_is_needed_is_refused(tmp_path, tokenizer):
    bare = str(texts.save_tokenizer(tmp_path, model_max_length=512))
    with pytest.raises(MisconfigurationException, match=r"tokenizer\.eos_token"):
        data_of(bare).setup("fit")
    with pytest.raises(MisconfigurationException, match="messages='chat'"):
        data_of(bare, messages="chat", prompt=None).setup("fit")
    # This one ends a conversation in other words, so that no turn is a prefix of the next.
    template = "{% for each in messages %}{{ each['content'] }} {% endfor %}{{ 'a' if messages|length > 1 else 'bad' }}"
    other = str(texts.save_tokenizer(tmp_path / "other", model_max_length=512, chat_template=template))
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "film"}]
    with pytest.raises(MisconfigurationException, match=r"dataset.*0"):
        data_of(other, [{"chat": chat}], messages="chat", prompt=None).setup("fit")


def test_packed_rows_are_not_grouped_by_length(tokenizer):
    with pytest.raises(MisconfigurationException, match=r"packing=True.*group_by_length=True"):
        data_of(tokenizer, packing=True, group_by_length=True)


def test_training_alone_is_packed(tokenizer):
    data = data_of(tokenizer, packing=True, max_length=17, batch_size=3)
    data.setup()
    (batch,) = data.train_dataloader()
    assert batch["input_ids"].shape[0] == 2
    assert sorted(batch["segments"].flatten().unique().tolist()) in ([0, 1, 2], [1, 2])
    assert "segments" not in next(iter(data.val_dataloader()))
    assert "segments" not in next(iter(data.predict_dataloader()))
    of_one_length = data_of(tokenizer, packing=True, max_length=24, batch_size=3, pad_to_multiple_of=24)
    of_one_length.setup()
    for row in (tensor for batch in of_one_length.train_dataloader() for tensor in batch.values()):
        assert row.shape[1] == 24
    with pytest.raises(ValueError, match=r"7.*max_length=6"):
        PackTexts(0, 6)([AnsweredTexts([[1] * 7], [[True] * 7])[0]])
    assert data.decode(torch.tensor([[*ids("a film"), END, END], ids("bad story [SEP] [PAD]")])) == [
        "a film",
        "bad story",
    ]
