"""The drafter: an EAGLE-3 head in plain PyTorch, how it is trained, measured and stored.

    config      shape of a head for a given target
    model       the head; computes what vLLM's EAGLE-3 drafter computes
    vocab       which tokens it can draft
    data        responses with the target's hidden states -> packed rows -> batches
    loss        test-time training: soft cross-entropy along the chain
    acceptance  how many drafts of the chain the target accepts
    trainer     one bounded forward, backward and update at a time
    checkpoint  the published EAGLE-3 folder layout

Modules lower in the list use those above them; nothing here knows Ray or an engine.
"""
