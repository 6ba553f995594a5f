import numpy as np
import pytest
import torch
import transformers
from pydantic import TypeAdapter

from fullstride.errors import ConfigError
from fullstride.llm import LLM, SamplingParams
from fullstride.llm.server.messages import template_messages
from fullstride.llm.server.schemas.messages import Message
from fullstride.llm.text.chat_template import ChatTemplate
from fullstride.llm.text.messages import plain_messages
from tests.llm.tiny import YARN

pytestmark = pytest.mark.usefixtures("compiled_soon")

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_llama) -> LLM:
    return LLM(tiny_llama, max_sequences=1, max_tokens_per_step=32, block_size=8)


@pytest.fixture(scope="module")
def theirs(tiny_llama):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    model.generation_config.eos_token_id = None
    return model


def generated(model, ids: list[int], count: int) -> list[int]:
    with torch.no_grad():
        out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[0, len(ids) :].tolist()


def test_text_or_token_ids_give_what_transformers_gives(llm, theirs):
    text = "The quick brown fox jumps over the lazy dog, and over it again."
    ids = llm.tokenizer.encode(text)
    (one,), (same,) = llm.generate(text, GREEDY), llm.generate(ids, GREEDY)
    assert one.outputs[0].token_ids == same.outputs[0].token_ids == generated(theirs, ids, 40)
    assert one.outputs[0].text == llm.tokenizer.decode(one.outputs[0].token_ids)
    assert (one.prompt, same.prompt, one.prompt_token_ids) == (text, None, ids)
    assert one.finished
    assert one.outputs[0].finish_reason == "length"


def test_a_model_whose_rope_is_scaled_for_longer_sequences(tiny_model):
    folder = tiny_model("qwen3", **YARN)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    ids = [3 + 7 * i % 300 for i in range(290)]
    made = LLM(folder, max_sequences=1, max_tokens_per_step=32)
    assert made.engine.sizes.max_length == 4 * 96
    assert made.generate(ids, GREEDY)[0].outputs[0].token_ids == generated(model, ids, 40)


def test_prompts_as_vllm_wraps_them(llm):
    ids = llm.tokenizer.encode(text := "The quick brown fox")
    ways = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}, [ids], [{"prompt": text}]]
    found = [llm.generate(way, sampling_params=GREEDY, use_tqdm=False) for way in ways]
    assert [len(outputs) for outputs in found] == [1] * 6
    assert all(outputs[0].outputs == found[0][0].outputs for outputs in found)
    assert llm.generate([]) == []
    with pytest.raises(ConfigError, match="a prompt has the keys prompt, multi_modal_data"):
        llm.generate({"prompt": text, "multi_modal_data": {}})


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_transformers_last_hidden_states(llm, theirs, pooling, seed):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 320, count).tolist() for count in (1, 50, 77)]
    llm.generate(prompts, GREEDY)  # whose blocks stay cached
    found = llm.embed(prompts, pooling=pooling, normalize=False, use_tqdm=False)
    short = [output.outputs.embedding for output in llm.embed(prompts, pooling=pooling)]
    for ids, output, unit in zip(prompts, found, short, strict=True):
        with torch.no_grad():
            states = theirs.model(torch.tensor([ids])).last_hidden_state[0].double().numpy()
        expected = states[-1] if pooling == "last" else states.mean(0)
        assert output.prompt_token_ids == ids
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-4)
        np.testing.assert_allclose(unit, expected / np.linalg.norm(expected), atol=1e-5)


def test_scores_are_transformers_log_likelihoods(llm, theirs):
    prompt, continuations = "The quick brown fox ", ["jumps over the lazy dog", "ate"]
    found, whole, start = llm.score(prompt, continuations, use_tqdm=False), list[int](), 0
    for continuation, output in zip(continuations, found, strict=True):
        whole, start = llm.tokenizer.encode(prompt + continuation), len(llm.tokenizer.encode(prompt.rstrip()))
        with torch.no_grad():
            rows = theirs(torch.tensor([whole])).logits[0].double().log_softmax(-1).numpy()[start - 1 : -1]
        own = [row[token] for row, token in zip(rows, whole[start:], strict=True)]
        assert output.token_ids == whole[start:]
        np.testing.assert_allclose(output.token_logprobs, own, atol=1e-3)
        assert output.logprob == pytest.approx(sum(own), abs=1e-2)
    ids = whole[:start]
    (said,) = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0))
    (completion,) = said.outputs
    (best, other) = llm.score([ids, ids], [completion.token_ids, [*completion.token_ids[:3], 5]], use_tqdm=False)
    assert best.greedy
    assert not other.greedy
    assert completion.cumulative_logprob == pytest.approx(best.logprob, abs=1e-3)
    assert llm.generate([ids], GREEDY)[0].outputs[0].cumulative_logprob is None
    for one, two, error in (
        (["a"], [[5]], "two of one kind"),
        (["a"], [""], "0 of continuation"),
        ([[]], [[5]], "0 tokens of prompt"),
        (["a", "b"], ["c"] * 3, "2 prompts for 3 continuations"),
    ):
        with pytest.raises(ConfigError, match=error):
            llm.score(one, two)


def test_outputs_are_in_the_order_of_the_prompts(llm):
    params = [SamplingParams(max_tokens=n, ignore_eos=True, n=2, logprobs=1) for n in (9, 2, 5)]
    found = llm.generate(["a", "b", [7, 8]], params)
    assert [[len(o.token_ids) for o in output.outputs] for output in found] == [[9, 9], [2, 2], [5, 5]]
    assert [len(o.logprobs or ()) for o in found[0].outputs] == [9, 9]


def test_what_a_request_computes_itself_was_not_cached(llm):
    asked, params = list(range(30, 60)), SamplingParams(max_tokens=2, n=2)
    assert [llm.generate(asked, params)[0].cached_tokens for _ in range(2)] == [0, 24]


def test_chat_uses_the_models_template(llm):
    messages = [{"role": "user", "content": "Hi"}]
    (one,), two = llm.chat(messages, GREEDY), llm.chat([messages, messages], GREEDY)
    text = llm.tokenizer.chat(messages)
    assert one.prompt == text
    assert one.prompt_token_ids == llm.tokenizer.encode(text, special=False)
    assert [output.outputs for output in two] == [one.outputs] * 2
    (other,) = llm.chat(messages, GREEDY, chat_template_kwargs={"add_generation_prompt": False}, use_tqdm=False)
    assert other.prompt == llm.tokenizer.chat(messages, add_generation_prompt=False)


# As Qwen's templates do it.
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
)


def test_chat_takes_what_openais_clients_send(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "template", ChatTemplate(CALLS, {}))
    parts = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    text, value = r'{"x": ["\u00e4", "\ud800"]}', {"x": ["ä", "\ufffd"]}
    calls = [{"id": str(i), "function": {"arguments": given, "name": "f"}} for i, given in enumerate((text, value, ""))]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "0", "content": "7"},
    ]
    said = '<tool_call>{"name": "f", "arguments": %s}</tool_call>'
    expected = "<|im_start|>system\nBe brief.\nBe kind.<|im_end|>\n<|im_start|>assistant\n"
    expected += said % '{"x": ["ä", "\ufffd"]}' * 2 + said % "{}" + "<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n"
    (found,) = llm.chat(messages, GREEDY)
    assert found.prompt == expected
    del calls[1]  # the server takes arguments as text alone
    (found,) = llm.chat(messages, GREEDY)
    served = template_messages(TypeAdapter(list[Message]).validate_python(messages))
    assert found.prompt == llm.tokenizer.chat(served)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"content": [{"type": "image_url"}]}, r"messages.0.content.0={'type': 'image_url'}: expected .*text only"),
        ({"tool_calls": [{"function": {}}]}, r"messages.0.tool_calls.0=.*: expected a dict with the name"),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            r"arguments='\[1\]': expected a JSON object",
        ),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, r"arguments='{': expected a JSON object"),
    ],
)
def test_messages_that_no_template_reads_are_refused(llm, message, error):
    with pytest.raises(ConfigError, match=error):
        llm.chat([{"role": "assistant"} | message], GREEDY)
    with pytest.raises(ConfigError, match=r"messages.1=.*: expected a dict, such as message.model_dump"):
        plain_messages([{"role": "user", "content": "a"}, object()])
    for wrong in ({"content": "a"}, {"role": None, "content": "a"}, {"role": 7}):
        with pytest.raises(ConfigError, match=r"messages.0.role=.*: expected the role"):
            plain_messages([wrong])


def test_a_model_without_a_name_is_not_the_folder_one_is_in():
    with pytest.raises(ConfigError, match="model='': expected a file, a folder or one of the names"):
        LLM("")


def test_stream_gives_deltas_and_ends_with_the_loop(llm):
    whole = llm.generate("Once", GREEDY)[0].outputs[0].text
    assert "".join(delta.text for delta in llm.stream("Once", GREEDY)) == whole
    for delta in llm.stream("Once", GREEDY):
        assert delta.token_ids
        break
    assert not llm.engine.busy


def test_a_prompt_that_cannot_run_runs_none(llm):
    with pytest.raises(ConfigError, match="prompt 1: the prompt has 300 tokens"):
        llm.generate([[5], [5] * 300])
    assert not llm.engine.busy
    with pytest.raises(ConfigError, match="2 sampling parameters for 1 prompts"):
        llm.generate("a", [GREEDY] * 2)


@pytest.mark.parametrize("where", ["_dispatch", "_read", "_leave"])
def test_ctrl_c_in_a_step_leaves_nothing_behind(llm, monkeypatch, where):
    original, calls = getattr(llm.engine, where), []

    def interrupted(*arguments):
        original(*arguments)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    whole = llm.generate(["Once", "upon"], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["Once", "upon", "a", "time"], GREEDY)
    stats = llm.engine.stats()
    assert not llm.engine.busy
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.blocks)
    assert [found.outputs for found in llm.generate(["Once", "upon"], GREEDY)] == [found.outputs for found in whole]


@pytest.mark.parametrize("wrong", ["half a pair: \ud800", {"prompt_token_ids": [3.5]}, {"prompt": None}, b"Once"])
def test_what_is_no_prompt_is_refused_and_leaves_nothing_behind(llm, wrong):
    with pytest.raises(ConfigError, match="prompt 1: .*: expected a text"):
        llm.generate(["Once", wrong], GREEDY)
    assert not llm.engine.busy
    with pytest.raises(ConfigError, match="prompt 0: .*: expected a text"):
        llm.generate(wrong, GREEDY)


@pytest.mark.parametrize("wrong", [{"temperature": 0}, [None], [{"temperature": 0}], 0.7])
def test_what_are_no_sampling_params_is_refused(llm, wrong):
    with pytest.raises(ConfigError, match="sampling_params=.*: expected SamplingParams"):
        llm._each(wrong, 1)  # past the annotations, which users' programs do not check


def test_a_setting_that_there_is_not_is_refused_by_name(tiny_llama):
    with pytest.raises(ConfigError, match="setting of the engine=max_lenght: expected one of max_length"):
        LLM(tiny_llama, max_lenght=100)


def test_a_stream_is_not_mixed_with_others(llm):
    stream = llm.stream("Once", GREEDY)
    first = next(stream)
    with pytest.raises(ConfigError, match="a stream is under way"):
        llm.generate("a", GREEDY)
    rest = "".join(delta.text for delta in stream)
    assert first.text + rest == llm.generate("Once", GREEDY)[0].outputs[0].text


def test_a_failed_step_is_an_error(llm, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no device")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine._runner, "run", broken)
        with pytest.raises(RuntimeError, match="no device"):
            llm.generate("a", GREEDY)
        with pytest.raises(RuntimeError, match="no device"):
            list(llm.stream("a", GREEDY))
        assert not llm.engine.busy
    assert len(llm.generate("a", GREEDY)[0].outputs[0].token_ids) == 40
