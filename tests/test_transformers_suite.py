"""transformers' own tests of a model, from the source distribution of the installed version, on tiny looped models.

They come from the package index, a few seconds; without it these tests are skipped. Each model is a run of
tests/transformers_suite/run.py in a process of its own, since those tests are a package `tests` too.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path

import pytest
import transformers


RUNNER = Path(__file__).parent / "transformers_suite" / "run.py"
FEWEST_PASSED = 110

# Pipelines for images, sounds, tables or masked words, of which the mixin has two tests each
OTHER_TASKS = """
any_to_any audio_classification automatic_speech_recognition depth_estimation document_question_answering fill_mask
image_classification image_feature_extraction image_segmentation image_text_to_text mask_generation object_detection
table_question_answering text_to_audio video_classification zero_shot_audio_classification
zero_shot_image_classification zero_shot_object_detection
"""

# Every test that may be skipped, and why. A test that is skipped without being here is a failure.
SKIPS = {
    "needs an accelerator, or several": """
        test_can_load_with_device_context_manager test_can_load_with_global_device_set test_cpu_offload
        test_disk_offload_bin test_disk_offload_safetensors test_flash_attn_kernels_mps_inference_equivalence
        test_flex_attention_with_grads test_model_parallelism test_sdpa_can_compile_dynamic
        test_sdpa_can_dispatch_on_flash test_torch_compile_for_training
    """,
    "needs flash attention, the kernels library, deepspeed or torchao": """
        test_flash_attn_2_can_compile_with_attention_mask_None_without_graph_break
        test_flash_attn_2_can_dispatch_composite_models test_flash_attn_2_fp32_ln test_flash_attn_2_from_config
        test_flash_attn_2_inference_equivalence test_flash_attn_2_inference_equivalence_right_padding
        test_flash_attn_3_can_dispatch_composite_models test_flash_attn_3_from_config
        test_flash_attn_3_inference_equivalence test_flash_attn_3_inference_equivalence_right_padding
        test_flash_attn_4_can_dispatch_composite_models test_flash_attn_4_from_config
        test_flash_attn_4_inference_equivalence test_flash_attn_4_inference_equivalence_right_padding
        test_flash_attn_kernels_inference_equivalence test_kernels_can_load_without_crashing
        test_resize_embeddings_untied_with_deepspeed test_resize_embeddings_untied_with_deepspeed_multi_gpu
        test_resize_tokens_embeddings_with_deepspeed test_resize_tokens_embeddings_with_deepspeed_multi_gpu
        test_tp_generation_quantized
    """,
    "is about a model of several models": """
        test_attn_implementation_composite_models test_can_set_attention_dynamically_composite_model
        test_internal_model_config_and_subconfig_are_same test_sdpa_can_dispatch_composite_models
    """,
    "is about mixtures of experts, encoders, images or partial rotary embeddings": """
        test_eager_matches_batched_and_grouped_inference_0_fp16 test_eager_matches_batched_and_grouped_inference_1_fp32
        test_eager_matches_batched_and_grouped_inference_2_bf16 test_moe_models_record_router_logits
        test_ep_backward test_ep_forward_0 test_ep_forward_1 test_fsdp2_expert_parallel_2d_vs_ddp
        test_fsdp2_expert_parallel_bf16_grads_0_experts_sharded
        test_fsdp2_expert_parallel_bf16_grads_1_experts_not_sharded test_moe_parallel_plans_shard_experts
        test_hsdp_grad_accumulation_vs_single_device_2_expert_parallel
        test_output_router_logits_from_config test_encoder_decoder_loss_no_double_shift test_vision_axial_rope
        test_resize_position_vector_embeddings test_model_rope_with_partial_rotation
    """,
    "checkpoints are saved as the model names its weights, none of them kept in fp32": """
        test_can_load_from_already_mapped_keys test_reverse_loading_mapping test_keep_in_fp32_modules
        test_keep_in_fp32_modules_exist test_keep_in_fp32_modules_strict_also_hardcode_fp32
    """,
    "runs for three classes; transformers' heads for tokens and answers return no cache": "test_bc_cache_name_forward",
    "reads a switch `use_sliding_window`; here the fields of windows are the switch": "test_sliding_window_mask",
    "its mixin is not in the source distribution": "test_generation_tester_mixin_inheritance",
    "is a pipeline for another kind of model": " ".join(
        f"test_pipeline_{task} test_pipeline_{task}_fp16" for task in OTHER_TASKS.split()
    ),
}

VALUE_EMBEDDING_SKIPS = {
    "value embeddings are looked up by token, so there are no inputs_embeds": """
        test_inputs_embeds test_inputs_embeds_matches_input_ids
    """,
}

MODEL_SKIPS = {"plain": {}, "parcae": VALUE_EMBEDDING_SKIPS, "flt": {}, "ouro": {}, "huginn": {}}


def skip_loudly(reason: str):
    warnings.warn(f"transformers' own model tests did NOT run: {reason}", stacklevel=2)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> Path:
    """The folder `tests` of the source distribution of the installed transformers."""
    folder = tmp_path_factory.mktemp("transformers")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    command += ["--timeout", "20", "--no-deps", "--no-binary", "transformers", "--dest", str(folder)]
    if importlib.util.find_spec("setuptools"):  # else pip fetches it, to read the metadata
        command.append("--no-build-isolation")
    command.append(f"transformers=={transformers.__version__}")
    try:
        subprocess.run(command, check=True, timeout=180, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        skip_loudly(f"the package index gave no source of transformers {transformers.__version__}: {error.output}")
    (archive,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as source:
        inside = f"{archive.name.removesuffix('.tar.gz')}/tests/"
        source.extractall(folder, [file for file in source if file.name.startswith(inside)], filter="data")
    return folder / inside


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first waits for the package index, too
@pytest.mark.parametrize("model", MODEL_SKIPS)
def test_a_looped_model_passes_the_tests_of_transformers(model, suite, tmp_path):
    report = tmp_path / "report.json"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(RUNNER), str(suite), model, str(report), "--tb=short"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert report.exists(), f"the run ended before its tests did:\n{run.stdout[-4000:]}"
    outcomes = json.loads(report.read_text())

    failures = [f"{test}\n{message}" for test, outcome, message in outcomes if outcome == "failed"]
    assert not failures, f"{len(failures)} failures with {model}:\n\n" + "\n\n".join(failures)

    allowed = {test for names in [*SKIPS.values(), *MODEL_SKIPS[model].values()] for test in names.split()}
    unexplained = {test: why for test, outcome, why in outcomes if outcome == "skipped" and test not in allowed}
    assert not unexplained, f"skipped with {model} for no reason given in this file: {unexplained}"

    passed = {test for test, outcome, _ in outcomes if outcome == "passed"}
    assert len(passed) >= FEWEST_PASSED, f"only {len(passed)} tests ran with {model}: {sorted(passed)}"


WAITING_RANKS = """
import multiprocessing, signal, sys, threading
import ranks

ranks.LONGEST = float(sys.argv[1])
multiprocessing.set_forkserver_preload(["ranks"])
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background


def wait_for_ever(rank):
    print("waits", flush=True)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


if __name__ == "__main__":
    ranks.start(wait_for_ever, nprocs=2)
"""


@pytest.fixture
def waiting_ranks(tmp_path):
    """Start a process with two ranks that wait for ever. Its output ends when all of them have ended."""
    script = tmp_path / "waiting.py"
    script.write_text(WAITING_RANKS)
    environment = {**os.environ, "PYTHONPATH": str(RUNNER.parent)}
    runs = []

    def start(longest: float):
        command = [sys.executable, str(script), str(longest)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        runs.append(subprocess.Popen(command, env=environment, **pipes))
        return runs[0]

    yield start
    for run in runs:
        run.kill()


@pytest.mark.slow
def test_a_rank_that_waits_for_ever_says_where_and_fails_its_test(waiting_ranks):
    run = waiting_ranks(longest=5)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "in wait_for_ever" in output and "ProcessExitedException" in output


@pytest.mark.slow
def test_ranks_end_with_the_process_of_the_tests(waiting_ranks):
    run = waiting_ranks(longest=600)
    assert [run.stdout.readline() for _ in range(2)] == ["waits\n"] * 2
    run.kill()
    run.communicate(timeout=30)
