"""The training objective is what an engine serves: chains, masks, packing and counts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from tlt.draft.acceptance import ServedAcceptance, evaluate_acceptance
from tlt.draft.config import make_head_config
from tlt.draft.data import DraftSequence, collate, cut, pack
from tlt.draft.loss import FrozenTarget, TttResult, ttt_loss
from tlt.draft.model import Eagle3Head
from tlt.draft.trainer import DraftTrainer, DraftTrainSettings
from tlt.errors import DraftTrainingError

VOCAB, HIDDEN, DRAFT = 120, 32, 60
TARGET = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
)


def make_head(seed: int = 0) -> Eagle3Head:
    torch.manual_seed(seed)
    config = make_head_config(TARGET, draft_vocab_size=DRAFT)
    config.initializer_range = 0.1
    return Eagle3Head(config, torch.arange(DRAFT) * 2)


def make_target(seed: int = 1) -> FrozenTarget:
    generator = torch.Generator().manual_seed(seed)
    return FrozenTarget(
        torch.randn(VOCAB, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3
    )


def make_sequence(length: int, num_prompt: int, seed: int) -> DraftSequence:
    generator = torch.Generator().manual_seed(seed)
    return DraftSequence(
        token_ids=torch.randint(0, DRAFT, (length,), generator=generator) * 2,
        aux_hidden=torch.randn(length, 3 * HIDDEN, generator=generator),
        final_hidden=torch.randn(length, HIDDEN, generator=generator),
        num_prompt_tokens=num_prompt,
    )


SEQUENCES = [make_sequence(length, prompt, seed) for seed, (length, prompt) in enumerate([(11, 4), (17, 5), (9, 2)])]


def grads(head: Eagle3Head) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}


def test_packed_loss_and_gradients_equal_the_unpacked_ones() -> None:
    """Catches attention, positions or targets that leak from one sequence of a row into its neighbour."""
    head, target = make_head(), make_target()
    (row,) = pack(SEQUENCES, tokens_per_row=64)
    assert len(row.windows) == 3
    packed = ttt_loss(head, target, collate([row]), num_steps=3, step_decay=0.8)
    packed.loss.backward()
    packed_grads = grads(head)

    head.zero_grad()
    separate = [
        ttt_loss(head, target, collate(pack([one], tokens_per_row=64)), num_steps=3, step_decay=0.8)
        for one in SEQUENCES
    ]
    # A loss is a mean over chains per step, so parts are weighted by their chains.
    chains = torch.tensor([result.num_chains for result in separate], dtype=torch.float64)
    assert packed.num_chains == tuple(int(n) for n in chains.sum(0))
    assert packed.num_accepted == tuple(int(n) for n in torch.tensor([r.num_accepted for r in separate]).sum(0))
    batch = ttt_loss(
        head, target, collate([pack([one], tokens_per_row=64)[0] for one in SEQUENCES]), num_steps=3, step_decay=0.8
    )
    batch.loss.backward()
    assert batch.loss.item() == pytest.approx(packed.loss.item(), rel=1e-5)
    for name, grad in grads(head).items():
        assert torch.allclose(grad, packed_grads[name], atol=1e-5), name


class _Cache:
    """Keys and values of one chain as an engine holds them: one entry per position, the drafts' behind the rest."""

    def __init__(self, keys: Sequence[Tensor] = (), values: Sequence[Tensor] = ()) -> None:
        self.keys, self.values = list(keys), list(values)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outputs = []
        for index in range(query.shape[2]):
            self.keys.append(key[:, :, index])
            self.values.append(value[:, :, index])
            keys = torch.stack(self.keys, 2).repeat_interleave(2, 1)
            values = torch.stack(self.values, 2).repeat_interleave(2, 1)
            one = query[:, :, index : index + 1]
            weights = (one @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1)
            outputs.append(weights @ values)
        return torch.cat(outputs, 2)


def slow_chains(
    head: Eagle3Head, target: FrozenTarget, one: DraftSequence, num_steps: int
) -> dict[tuple[int, int], Tensor]:
    """Draft logits of (anchor, step), each chain run by itself with a cache, as served."""
    logits = {}
    for anchor in range(max(one.num_prompt_tokens - 1, 0), len(one.token_ids) - 1):
        cache = _Cache()
        # The engine's first pass: every verified position, with the token after it.
        positions = torch.arange(anchor + 1).unsqueeze(0)
        embeddings = target.embed(one.token_ids[1 : anchor + 2]).unsqueeze(0)
        normed, prenorm = head(embeddings, head.combine(one.aux_hidden[: anchor + 1]).unsqueeze(0), positions, cache)
        for step in range(num_steps):
            if step:
                token = anchor + 1 + step
                if token >= len(one.token_ids):
                    break
                embeddings = target.embed(one.token_ids[token]).view(1, 1, -1)
                normed, prenorm = head(embeddings, prenorm[:, -1:], torch.tensor([[anchor + step]]), cache)
            logits[anchor, step] = head.logits(normed[0, -1])
    return logits


def test_each_step_equals_a_chain_with_a_cache() -> None:
    """Catches plain causal attention in place of the diagonal, a shifted token, position or target."""
    head, target = make_head(), make_target()
    one, num_steps = SEQUENCES[1], 4
    with torch.no_grad():
        result = ttt_loss(head, target, collate(pack([one], tokens_per_row=64)), num_steps=num_steps, step_decay=0.7)
        chains = slow_chains(head, target, one, num_steps)
    losses, accepted, counted = [], [0] * num_steps, [0] * num_steps
    ids = head.draft_token_ids
    per_step: list[list[Tensor]] = [[] for _ in range(num_steps)]
    for anchor in range(one.num_prompt_tokens - 1, len(one.token_ids)):
        alive = True
        for step in range(num_steps):
            label = anchor + 2 + step
            if label >= len(one.token_ids):
                break
            logits = chains[anchor, step]
            probs = target.draft_logits(one.final_hidden[label - 1], ids).softmax(-1)
            per_step[step].append(-(probs * logits.log_softmax(-1)).sum())
            alive = alive and bool(ids[logits.argmax()] == one.token_ids[label])
            counted[step] += 1
            accepted[step] += alive
    losses = [torch.stack(step_losses).mean() for step_losses in per_step]
    weights = [0.7**step for step in range(num_steps)]
    expected = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert result.loss.item() == pytest.approx(float(expected), rel=1e-4)
    assert result.num_chains == tuple(counted)
    assert result.num_accepted == tuple(accepted)


def test_windows_count_every_anchor_of_the_response_once() -> None:
    """Catches positions of long responses that are trained on twice, or never, as with a cap at a fixed length."""
    for length, num_prompt in ((20, 5), (64, 1), (65, 30), (300, 40), (301, 200), (129, 0)):
        one = make_sequence(length, num_prompt, 0)
        windows = cut(one, 64)
        counted = [anchor for window in windows for anchor in range(window.counted, window.counted_end)]
        assert counted == list(range(max(num_prompt - 1, 0), length))
        for window in windows:
            assert 0 <= window.begin <= window.counted
            assert window.counted_end <= window.end <= length
            assert window.num_tokens <= 64


def test_a_window_computes_what_the_whole_sequence_does_given_its_context() -> None:
    """Catches windows with positions that start at zero."""
    one = make_sequence(100, 10, 3)
    batch = collate(pack([one], tokens_per_row=64))
    assert batch.positions.max() == 99
    row = int((batch.positions == 99).nonzero()[0, 0])
    column = int((batch.positions[row] == 99).nonzero()[0, 0])
    assert torch.equal(batch.aux_hidden[row, column], one.aux_hidden[99])


def toy_sequences(target: FrozenTarget, num: int) -> list[DraftSequence]:
    """A target whose next token is a function of the last, which its states show."""
    generator = torch.Generator().manual_seed(5)
    table = torch.randperm(DRAFT, generator=generator) * 2
    following = dict(zip((torch.arange(DRAFT) * 2).tolist(), table.tolist(), strict=True))
    states = torch.randn(VOCAB, 3 * HIDDEN, generator=generator)
    sequences = []
    for _ in range(num):
        tokens = [int(torch.randint(0, DRAFT, (), generator=generator)) * 2]
        while len(tokens) < 24:
            tokens.append(following[tokens[-1]])
        ids = torch.tensor(tokens)
        # The state before token t + 1 points at it in the output projection.
        final = target._lm_head[torch.tensor([following[token] for token in tokens])] * 20.0
        sequences.append(DraftSequence(token_ids=ids, aux_hidden=states[ids], final_hidden=final, num_prompt_tokens=2))
    return sequences


def test_a_head_learns_a_deterministic_target_completely() -> None:
    """Catches an objective that trains well and serves badly: acceptance as served must come near its maximum."""
    target, head = make_target(), make_head()
    sequences = toy_sequences(target, 12)
    batches = [collate(pack(sequences, tokens_per_row=96))]
    settings = DraftTrainSettings(num_ttt_steps=3, learning_rate=1e-2, warmup_steps=5, total_steps=150, bf16=False)
    trainer = DraftTrainer(head, target, settings)
    before = evaluate_acceptance(head, target, batches, num_steps=3, bf16=False).acceptance_length(3)
    for _ in range(150):
        trainer.micro_step(batches[0])
    after = evaluate_acceptance(head, target, batches, num_steps=3, bf16=False).acceptance_length(3)
    assert before < 1.5
    assert after > 3.8


def test_training_continues_bit_for_bit_and_stops_at_nan() -> None:
    """Catches an optimizer that starts anew, and a head that is updated with a gradient that is not finite."""
    target = make_target()
    batch = collate(pack(SEQUENCES, tokens_per_row=64))
    settings = DraftTrainSettings(num_ttt_steps=2, bf16=False)
    whole = DraftTrainer(make_head(), target, settings)
    for _ in range(4):
        whole.micro_step(batch)
    first = DraftTrainer(make_head(), target, settings)
    for _ in range(2):
        first.micro_step(batch)
    second = DraftTrainer(make_head(seed=9), target, settings)
    second.load_state_dict(first.state_dict())
    # The donor goes on as well: a shared optimizer state would reach the continuation.
    first.micro_step(batch)
    for _ in range(2):
        second.micro_step(batch)
    for name, value in whole.state_dict()["head"].items():
        assert torch.equal(value, second.state_dict()["head"][name]), name

    bad = make_sequence(11, 4, 0)
    bad.aux_hidden[5] = float("nan")
    weights = {name: value.clone() for name, value in whole.state_dict()["head"].items()}
    with pytest.raises(DraftTrainingError, match="diverged"):
        whole.micro_step(collate(pack([bad], tokens_per_row=64)))
    for name, value in whole.state_dict()["head"].items():
        assert torch.equal(value, weights[name]), name


def test_acceptance_length_and_its_error() -> None:
    """Hand-computed. Catches conditional rates added up as if they were unconditional."""
    acceptance = ServedAcceptance(num_chains=(100, 100), num_accepted=(60, 30))
    assert acceptance.per_position == (0.6, 0.3)
    assert acceptance.acceptance_length(1) == pytest.approx(1.6)
    assert acceptance.acceptance_length(2) == pytest.approx(1.9)
    # var = .6*.4 + .3*.7 + 2 * .3*.4 = 0.69
    assert acceptance.stderr(2) == pytest.approx((0.69 / 100) ** 0.5)
    assert (acceptance + acceptance).num_accepted == (120, 60)
    assert (ServedAcceptance() + acceptance) == acceptance


def test_the_target_receives_no_gradient() -> None:
    """Catches a shared embedding that drifts."""
    embedding = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    result: TttResult = ttt_loss(
        make_head(),
        FrozenTarget(embedding, embedding),
        collate(pack(SEQUENCES, tokens_per_row=64)),
        num_steps=2,
        step_decay=1.0,
    )
    result.loss.backward()
    assert embedding.grad is None
