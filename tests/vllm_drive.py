"""Run by vLLM's interpreter: python vllm_drive.py MODEL METHOD; prints token ids and vLLM's own counts as JSON.

METHOD is "none", or "lookahead" for draftree's proposer. Prompts come at once, then again one by one.
"""

import json
import sys

QUESTIONS = [
    f"Tell me a long story of the {thing}." for thing in ("sea", "wood", "hill", "town", "bird", "king", "moon")
]


def main(model: str, method: str) -> None:
    from vllm import LLM, SamplingParams

    from draftree.integrations.vllm import speculative_config

    options = {"speculative_config": speculative_config(8)} if method == "lookahead" else {}
    llm = LLM(
        model,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        enforce_eager=True,
        disable_log_stats=False,
        **options,
    )
    found = []
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, seed=7, max_tokens=80, ignore_eos=True)
        asked = [[{"role": "user", "content": text}] for text in QUESTIONS]
        groups = [asked, *([one] for one in asked)]
        answers = [answer for group in groups for answer in llm.chat(group, params, use_tqdm=False)]
        if temperature == 0:  # sampled texts are equal in distribution alone, by vLLM's own rule
            found = [list(answer.outputs[0].token_ids) for answer in answers]
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    drafted = {name.rpartition("_num_")[2]: counts[name] for name in counts if "spec_decode_num" in name}
    print("FOUND " + json.dumps({"ids": found, "drafted": drafted}))


if __name__ == "__main__":
    main(*sys.argv[1:])
