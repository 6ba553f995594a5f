import openai
import pytest

HELLO = [{"role": "user", "content": "é"}]


def test_models(client):
    assert [model.id for model in client.models.list()] == ["fake", "alias/of-fake"]
    model = client.models.retrieve("alias/of-fake")
    assert (model.id, model.object, model.max_model_len) == ("alias/of-fake", "model", 1024)
    with pytest.raises(openai.NotFoundError, match="none"):
        client.models.retrieve("none")


def test_the_list_of_models_has_a_slash_for_who_writes_one(http):
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()
    assert http.head("/v1/models/").status_code == 200
    assert http.post("/v1/models/").status_code == 405


def test_an_answer_bears_the_name_that_was_asked_for(client):
    assert client.completions.create(model="alias/of-fake", prompt="x").model == "alias/of-fake"


def test_tokens_of_a_text_and_back(http):
    answer = http.post("/tokenize", json={"prompt": "aé", "return_token_strs": True}).json()
    assert answer == {
        "count": 4,
        "max_model_len": 1024,
        "tokens": [257, 97, 195, 169],
        "token_strs": ["<start>", "a", "�", "�"],
    }
    assert http.post("/detokenize", json={"tokens": [257, 97, 195, 169]}).json() == {"prompt": "<start>aé"}
    assert http.post("/tokenize", json={"prompt": "a", "add_special_tokens": False}).json()["tokens"] == [97]


def test_tokens_of_a_chat_are_those_that_the_engine_gets(http, live):
    tools = [{"type": "function", "function": {"name": "f"}}]
    for body in ({"messages": HELLO}, {"messages": HELLO, "tools": tools, "add_generation_prompt": False}):
        tokens = http.post("/tokenize", json=body).json()["tokens"]
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        assert live.engine.prompts[-1] == tokens


def test_texts_that_the_model_could_not_take_are_counted(http):
    answer = http.post("/tokenize", json={"prompt": "x" * 50_000}).json()
    assert (answer["count"], answer["max_model_len"]) == (50_001, 1024)
    assert http.post("/detokenize", json={"tokens": [97] * 20_000}).json() == {"prompt": "a" * 20_000}


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": HELLO}, {"prompt": "x", "model": "none"}])
def test_what_tokenize_refuses(http, body):
    assert http.post("/tokenize", json=body).status_code == (404 if "model" in body else 400)


def test_what_detokenize_refuses(http):
    assert http.post("/detokenize", json={"tokens": [259]}).json()["error"]["param"] == "tokens"
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_alive_and_ready(http):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", "/v1/models/fake", "/openapi.json"])
def test_head_is_get_without_a_body(http, path):
    head, got = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]


def test_head_says_what_get_would(http):
    assert http.head("/v1/models/none").status_code == 404
    assert http.head("/v1/completions").status_code == 405


def test_the_description_names_all_routes(http):
    paths = http.get("/openapi.json").json()["paths"]
    assert paths.keys() == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/models",
        "/v1/models/{model}",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
        "/metrics",
    }
