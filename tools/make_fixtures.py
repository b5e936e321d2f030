"""Write the tiny random models of tests/fixtures/models and the logits they must give.

Owns: the expected logits, computed by Hugging Face transformers (float32, eager attention), which
shares no code with vkmoe.  Does not own the models themselves (tiny_models/) nor the demo model's
references (make_demo_reference.py).

Per model two files: `NAME.gguf` and `NAME.npz` with
    tokens         int32 [n_tokens], the prompt
    logits         float32 [n_tokens, vocabulary]
    router_ids     int16 [MoE layers, n_tokens, top_k], best expert first (MoE only)
    router_margin  float32 [MoE layers, n_tokens], score of the last chosen expert (or group) less
                   that of the first one left out; infinite where every expert is used (MoE only)
    states         float32 [n_tokens, width], what the output matrix reads (of WITH_STATES only)
    ctx_size       int, the context the logits hold for, where it changes them
    guess_logits   float32 [n_tokens - 1, vocabulary], of the layer that guesses tokens ahead: row i
                   is behind token i + 1, by that token and the state of token i
    further_logits float32 [vocabulary], of the same layer behind the likeliest token of its last
                   row, by that token and the state that it left there
Drafters, in the folder `drafters` beside the models, have the last two alone, as for their models.
Seeds are searched for until no margin is below MIN_MARGIN, so that rounding cannot flip a choice.

Needs torch, transformers, gguf and numpy; no test needs the first two. Drafters need transformers
5.22 or older: the next two refuse layers that all see what others keep.  In the repository's root:
    python -m tools.make_fixtures [--out tests/fixtures/models] [NAME ...]
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tools.tiny_models import DRAFTERS, MODELS, TinyModel
from tools.tiny_models.drawing import Weights
from tools.tiny_models.gemma4 import Drafter
from tools.tiny_models.routing import choose
from tools.tiny_models.vocabulary import vocabulary

MIN_MARGIN = 2e-3
# One with plain attention, one with latent attention, one with windows, one with a recurrent state.
WITH_STATES = ("moe_plain", "deepseek2_v3", "gemma4_odd", "qwen35moe_odd")

Routers = list[tuple[NDArray[Any], NDArray[Any]]]


def network_of(model: TinyModel, weights: Weights) -> Any:
    """The same model as a network of transformers."""
    torch, transformers = import_module("torch"), import_module("transformers")
    config = getattr(transformers, model.hf_config)(**model.hf_options())
    network = getattr(transformers, f"{model.hf_kind}ForCausalLM")(config).float().eval()
    state = {name: torch.from_numpy(value) for name, value in model.hf_state(weights).items()}
    network.load_state_dict(state, strict=True)
    return network


def watch_routers(network: Any) -> Routers:
    """A list that gets the logits and the chosen experts of each router as it runs."""
    seen: Routers = []
    for module in network.modules():
        if "Router" in type(module).__name__ or type(module).__name__ == "HunYuanMoEV1Gate":
            module.register_forward_hook(
                lambda _module, _inputs, out: seen.append((out[0].numpy(), out[2].numpy()))
            )
    return seen


def expected(
    model: TinyModel, weights: Weights, tokens: NDArray[np.int32]
) -> dict[str, NDArray[Any]]:
    """Run transformers on `tokens` and return the arrays of the .npz file."""
    torch = import_module("torch")
    torch.set_num_threads(2)
    network = network_of(model, weights)
    routers = watch_routers(network)
    with torch.no_grad():
        logits = network(torch.from_numpy(tokens[None].astype(np.int64))).logits[0].numpy()
    result: dict[str, NDArray[Any]] = {"tokens": tokens, "logits": logits.astype(np.float32)}
    if model.experts:
        layers = range(model.layers - len(routers), model.layers)
        choices = []
        for layer, (router_logits, theirs) in zip(layers, routers, strict=True):
            scores = model.scores(weights, layer, router_logits)
            choices.append(choose(scores, model.top_k, model.groups))
            if choices[-1].margin.min() >= MIN_MARGIN:
                np.testing.assert_array_equal(np.sort(choices[-1].ids), np.sort(theirs))
        result["router_ids"] = np.stack([choice.ids for choice in choices])
        result["router_margin"] = np.stack([choice.margin for choice in choices])
    if model.name in WITH_STATES:
        with torch.no_grad():
            left = network.model(torch.from_numpy(tokens[None].astype(np.int64)))
        result["states"] = left.last_hidden_state[0].numpy()
    if model.ahead:
        found = guesses(model, weights, network, tokens)
        result |= dict(zip(("guess_logits", "further_logits"), found, strict=True))
    if model.ctx_size:
        result["ctx_size"] = np.array(model.ctx_size, np.int32)
    return result


def guesses(
    model: TinyModel, weights: Weights, network: Any, tokens: NDArray[np.int32]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """What the layer that guesses tokens ahead gives, as a network of one layer; then further.

    In float64: behind all other layers and three more norms, transformers' own float32 is not near
    enough. Changes `network` to it.
    """
    torch = import_module("torch")
    one, one_weights, inputs = model.guesses(weights)
    network.double()
    guessing = network_of(one, one_weights).double()
    ids = torch.from_numpy(tokens[None].astype(np.int64))

    def run(following: NDArray[Any], states: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """The states that the layer leaves, and the logits."""
        embedded = one_weights["token_embd.weight"][following].astype(np.float64)
        both = [
            rows / np.sqrt((rows**2).mean(-1, keepdims=True) + model.eps) * inputs[f"{gain}.weight"]
            for gain, rows in (("enorm", embedded), ("hnorm", states))
        ]
        joined = np.concatenate(both, axis=1) @ inputs["eh_proj.weight"].T
        left = guessing.model(inputs_embeds=torch.from_numpy(joined[None])).last_hidden_state
        return left[0].numpy(), guessing.lm_head(left)[0].numpy()

    with torch.no_grad():
        states = network.model(ids).last_hidden_state[0, :-1].numpy()
        left, logits = run(tokens[1:], states)
        further = [*tokens[1:], logits[-1].argmax()], np.concatenate([states, left[-1:]])
        found = logits, run(*map(np.asarray, further))[1][-1]
        return found[0].astype(np.float32), found[1].astype(np.float32)


def drafts(
    drafter: Drafter, weights: Weights, model: TinyModel, drawn: Drawn
) -> dict[str, NDArray[Any]]:
    """What a drafter gives for its model: `guess_logits` and `further_logits`.

    Behind token i + 1, at its position, by that token and the state of token i, over the model's
    keys and values up to token i: as many as the window has, where there is one. In float64.
    """
    torch = import_module("torch")
    network = network_of(model, drawn.weights).double()
    guessing = network_of(drafter, weights).double()
    tokens = torch.from_numpy(drawn.arrays["tokens"][None].astype(np.int64))
    window = {"sliding_attention": drafter.window}

    def run(row: int, token: Any, state: Any) -> tuple[Any, Any]:
        """The logits, and the state for the guess behind."""
        end = row + 1
        seen = {
            kind: tuple(x[:, :, max(0, end - window.get(kind, end)) : end] for x in pair)
            for kind, pair in left.shared_kv_states.items()
        }
        both = torch.cat([network.get_input_embeddings()(token), state], dim=-1)
        position = torch.tensor([[end]])
        out = guessing(inputs_embeds=both, position_ids=position, shared_kv_states=seen)
        return out.logits[0, -1], out.last_hidden_state

    with torch.no_grad():
        left = network.model(tokens, return_shared_kv_states=True)
        states = left.last_hidden_state
        rows = range(tokens.shape[1] - 1)
        found = [run(i, tokens[:, i + 1 : i + 2], states[:, i : i + 1]) for i in rows]
        logits, state = found[-1]
        further, _ = run(rows[-1], logits.argmax()[None, None], state)
    guesses = torch.stack([logits for logits, _ in found])
    return {
        "guess_logits": guesses.numpy().astype(np.float32),
        "further_logits": further.numpy().astype(np.float32),
    }


class Drawn(NamedTuple):
    """A model's weights from the first seed without a router near-tie, and what it must give."""

    seed: int
    weights: Weights
    arrays: dict[str, NDArray[Any]]


def drawn(model: TinyModel) -> Drawn:
    """Search for the seed. Raises SystemExit where there is none."""
    for seed in range(1000):
        weights = model.draw(seed)
        rng = np.random.default_rng(seed + 7)
        tokens = rng.integers(0, len(vocabulary()), model.n_tokens)
        arrays = expected(model, weights, tokens.astype(np.int32))
        if not model.experts or arrays["router_margin"].min() >= MIN_MARGIN:
            return Drawn(seed, weights, arrays)
    raise SystemExit(f"{model.name}: no seed without a near-tie")


def make(model: TinyModel, folder: Path) -> None:
    """Write both files of one model."""
    seed, weights, arrays = drawn(model)
    model.write(folder / f"{model.name}.gguf", weights)
    np.savez_compressed(folder / f"{model.name}.npz", **arrays)  # type: ignore[arg-type]
    logits = arrays["logits"]
    margin = arrays["router_margin"].min() if model.experts else np.inf
    spread = f"std {logits.std():.2f}, max {np.abs(logits).max():.2f}"
    print(f"{model.name}: seed {seed}, logits {spread}, least margin {margin:.4f}", flush=True)


def make_drafter(drafter: Drafter, folder: Path) -> None:
    """Write both files of a drafter; its model is drawn anew, as ever."""
    folder.mkdir(parents=True, exist_ok=True)
    model = next(model for model in MODELS if model.name == drafter.target)
    weights = drafter.draw(0)
    arrays = drafts(drafter, weights, model, drawn(model))
    drafter.write(folder / f"{drafter.name}.gguf", weights)
    np.savez_compressed(folder / f"{drafter.name}.npz", **arrays)  # type: ignore[arg-type]
    logits = arrays["guess_logits"]
    n_apart = len(np.unique(logits.argmax(axis=1)))
    print(f"{drafter.name}: std {logits.std():.2f}, {n_apart} tokens in {len(logits)}", flush=True)


def main() -> None:
    """Write every fixture, or those named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "models"
    parser.add_argument("--out", type=Path, default=default, help="folder to write to")
    parser.add_argument("names", nargs="*", metavar="NAME", help="models (default: all)")
    options = parser.parse_args()
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        if not options.names or model.name in options.names:
            make(model, folder)
    for drafter in DRAFTERS:
        if not options.names or drafter.name in options.names:
            make_drafter(drafter, folder.parent / "drafters")


if __name__ == "__main__":
    main()
