"""Names that other systems give to settings, and the keys of asyncrl that mean the same. Standard library only.

Errors about an unknown key or flag look here. The names are those of TRL, verl, OpenRLHF, prime-rl, transformers and
vLLM, in lower case with underscores. Invariant: each key of the table exists, and no name is there twice.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of another system's name in asyncrl.

    ``keys`` are asyncrl's keys for it, dotted, with NAME in place of the name of an evaluation. They are empty if
    asyncrl has no such setting. ``note`` says how the keys differ from the other system's setting, or why there are no
    keys.
    """

    keys: tuple[str, ...]
    note: str = ""

    def near(self, path: str) -> tuple[str, ...]:
        """Choose the keys to suggest to a user who has written the name at ``path`` (dotted).

        These are the keys in the section of ``path``, or all keys if that section has none. In a section eval.NAME, the
        evaluation's own name replaces NAME.
        """
        section, _, rest = path.partition(".")
        here = tuple(key for key in self.keys if key.partition(".")[0] == section)
        name, dot, _ = rest.partition(".")
        if section == "eval" and dot:
            here = tuple(key.replace("NAME", name) for key in here)
        return here or self.keys


def meaning_of(name: str) -> Meaning | None:
    """Look a name up, in any case and with - or _. Returns None for an unknown name."""
    return _MEANINGS.get(name.lower().replace("-", "_"))


def describe_meaning(meaning: Meaning, path: str) -> str:
    """Describe asyncrl's keys for a name that the user has written at ``path``, in one sentence."""
    if not meaning.keys:
        return f"asyncrl has no such setting: {meaning.note}"
    keys = meaning.near(path)
    return f"asyncrl has {' and '.join(keys)} for it" + (f" ({meaning.note})" if meaning.note else "")


_TABLE = """
# the learner's step
learning_rate lr actor_lr actor_learning_rate policy_lr | learner.lr
lr_scheduler_type lr_scheduler scheduler lr_decay_style lr_schedule | learner.decay
warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio | learner.warmup_steps
  | it counts steps: the ratio times learner.steps
num_warmup_steps lr_warmup_steps warmup warmup_iters | learner.warmup_steps
min_lr min_learning_rate lr_min | learner.min_lr_ratio | it is a share of learner.lr
weight_decay wd | learner.weight_decay
adam_beta1 adam_beta2 adam_betas beta1 beta2 | learner.betas | it holds both
max_grad_norm gradient_clipping grad_clip clip_grad clip_grad_norm max_norm | learner.max_grad_norm
adam_epsilon adam_eps | | the epsilon of AdamW is torch's default
optim optimizer optimizer_type | learner.optimizer
batch_size train_batch_size global_batch_size rollout_batch_size prompts_per_step num_prompts_per_step
  | learner.groups_per_step | it counts prompt groups, each of rollout.samples_per_prompt responses
per_device_train_batch_size micro_batch_size micro_train_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu
  train_micro_batch_size_per_gpu ppo_max_token_len_per_gpu | learner.tokens_per_microbatch
  | micro-batches are packed to a number of tokens
gradient_accumulation_steps grad_accum grad_accumulation_steps | learner.groups_per_step learner.tokens_per_microbatch
  | a step accumulates over as many micro-batches as its groups fill
mini_batch_size ppo_mini_batch_size num_mini_batches num_minibatches | learner.updates_per_batch
  | it is the number of updates that share a step's groups
num_iterations ppo_epochs num_ppo_epochs num_inner_epochs | | each token is trained once
epochs epoch num_epochs num_train_epochs total_epochs max_epochs num_episodes | learner.steps
  | it counts optimizer steps; an epoch has as many as the prompts divided by learner.groups_per_step
max_steps total_steps num_steps train_steps training_steps num_train_steps total_training_steps iterations
  | learner.steps
# the objective
beta kl_coef kl_coeff kl_beta kl_weight kl_loss_coef init_kl_coef kl_penalty_coef | learner.kl.coefficient
kl_penalty kl_estimator kl_loss_type kl_type | learner.kl.estimator
use_kl_loss use_kl_in_reward kl_in_reward | learner.kl.place learner.kl.coefficient
ref_model reference_model ref_model_path ref_path reference_path | learner.kl.path
epsilon epsilon_low epsilon_high eps_clip clip_eps clip_range cliprange clip_ratio clip_ratio_low clip_ratio_high
  ppo_clip | learner.loss_options | as { clip_low = 0.2, clip_high = 0.28 }
entropy_coef entropy_coeff ent_coef entropy_weight | learner.entropy_bonus
adv_estimator advantage_estimator algorithm algo | learner.advantage learner.loss
loss_type policy_loss loss_fn | learner.loss learner.aggregation
loss_agg_mode loss_reduction | learner.aggregation
scale_rewards norm_adv_by_std_in_grpo | learner.advantage | another advantage leaves the deviation out
tis tis_imp_ratio_cap importance_ratio_cap vllm_importance_sampling_cap | learner.tis_cap
importance_sampling_level | learner.loss learner.correction.weight
gamma lam gae_lambda | | there is no value function: a reward is that of a trajectory or of a turn
critic critic_model value_model vf_coef value_loss_coef critic_lr | | there is no value function
filter_groups zero_variance_filter online_filtering | learner.dynamic_sampling
mask_truncated_completions overlong_filtering overlong_buffer soft_overlong_punishment soft_punish_cache
  | reward.truncated | it is "mask" or "penalty"
# generation
num_generations n group_size num_samples samples_per_prompt n_samples_per_prompt num_return_sequences rollout_n
  num_rollouts rollouts_per_example rollouts_per_prompt generations_per_prompt | rollout.samples_per_prompt eval.NAME.n
max_new_tokens max_completion_length max_completion_tokens max_response_length max_response_tokens max_tokens
  response_length generate_max_len max_gen_len max_output_tokens | rollout.max_tokens eval.NAME.max_tokens
temperature sampling_temperature | rollout.temperature eval.NAME.temperature
top_p nucleus_p | rollout.top_p
top_k | rollout.top_k
min_p | rollout.min_p
typical_p | | the learner scores tokens under the whole distribution, so the engines sample from all of it
repetition_penalty presence_penalty frequency_penalty logit_bias no_repeat_ngram_size |
  | the learner scores tokens under the whole distribution, so the engines sample from all of it
stop_sequences stop_strings stop_words stop_tokens | rollout.stop
eos_token_id eos_token stop_token | rollout.stop_token_ids | the model's own end token ends a response anyway
use_vllm vllm_mode inference_engine inference_backend rollout_engine | rollout.engine
gpu_memory_utilization vllm_gpu_memory_utilization gpu_mem_util | rollout.vllm.gpu_memory_utilization
max_num_seqs vllm_max_num_seqs | rollout.vllm.max_num_seqs
enforce_eager vllm_enforce_eager | rollout.vllm.enforce_eager
quantization rollout_quantization fp8_rollout | rollout.vllm.quantization
max_num_batched_tokens enable_prefix_caching enable_chunked_prefill kv_cache_dtype swap_space | rollout.vllm.extra
  | it holds further arguments of vLLM's engine
max_length max_seq_len max_seq_length max_sequence_length max_model_len seq_len vllm_max_model_len
  | rollout.vllm.max_model_len data.max_prompt_tokens rollout.max_tokens
  | the first is the sum of the others unless given
tensor_parallel_size tensor_model_parallel_size vllm_tensor_parallel_size tp tp_size rollout_tp
  | rollout.gpus_per_replica
data_parallel_size dp dp_size num_engines vllm_num_engines num_replicas num_rollout_workers | rollout.replicas
num_gpus n_gpus gpus n_gpus_per_node num_gpus_per_node nproc_per_node world_size num_processes
  | learner.ranks rollout.replicas rollout.gpus_per_replica
  | the learner takes the first, the engines the product of the others
nnodes num_nodes num_machines | | hosts are named by --hosts FILE, or by --slurm --nodes N
max_staleness staleness_limit max_async_level async_level max_off_policy_steps off_policy_steps max_head_offpolicyness
  async_steps | staleness.max | it counts versions
max_turns max_steps_per_episode max_assistant_turns | episode.max_turns
environment env_name env_id | episode.env
# model
model_name model_name_or_path model_path model_id base_model pretrained_model_name_or_path pretrain actor_model
  policy_model checkpoint_path | model.path | a folder, or ORG/NAME of the hub
tokenizer tokenizer_path tokenizer_name tokenizer_name_or_path | | the tokenizer is that of model.path
torch_dtype dtype bf16 fp16 precision mixed_precision param_dtype | learner.dtype
attn_implementation attn_impl flash_attention flash_attn use_flash_attention_2 use_flash_attn |
  | the learner takes the fastest attention that is installed
lora_r lora_rank r use_lora use_peft peft peft_config lora_config | lora.rank
lora_alpha | lora.alpha
lora_target_modules target_modules | lora.targets
lora_dropout | | engines have no dropout, so the learner would train another policy than the one that samples
load_in_4bit load_in_8bit use_qlora qlora | | a quantized model is not trained; lora.rank saves memory
gradient_checkpointing enable_gradient_checkpointing recompute | learner.activation_checkpointing
cpu_offload offload_optimizer optimizer_offload param_offload fsdp_offload adam_offload | learner.offload
torch_compile use_torch_compile | learner.compile
deepspeed zero_stage fsdp fsdp_config fsdp_size | learner.ranks learner.replicas | FSDP2 shards the model over the ranks
context_parallel_size cp_size cp sequence_parallel_size sp_size ulysses_sequence_parallel_size ulysses_degree
  ring_attn_size | learner.context_parallel
# data
dataset dataset_name dataset_path train_dataset train_file train_files train_data prompt_data data_path data_files
  data_dir input_data | data.path
eval_dataset eval_data val_file val_files val_data test_file test_files validation_file | eval.NAME.data.path
dataset_split train_split prompt_split | data.split
input_key prompt_column dataset_text_field text_column question_key | data.prompt_key
label_key answer_key answer_column ground_truth_key label_column | reward.options | as { answer_key = "COLUMN" }
system_prompt system_message | data.system
apply_chat_template chat_template use_chat_template | data.template
  | it is "chat" or "plain"; a template of your own is chat_template.jinja in the model's folder
max_prompt_length max_prompt_len prompt_max_len prompt_length filter_overlong_prompts | data.max_prompt_tokens
  | longer prompts are left out
# reward
reward_fn reward_func reward_funcs reward_function reward_functions reward_fn_path custom_reward_function reward_manager
  verifier remote_rm_url | reward.function | MODULE:FUNCTION, or a built-in name
reward_model reward_model_path rm judge judge_model | reward.function | a served model scores as a judge
reward_weights | reward.function | a function that returns a mapping is worth the sum of its numbers
num_reward_workers reward_num_workers | reward.workers
# the run
seed random_seed | run.seed
run_name experiment_name exp_name trial_name wandb_run_name wandb_name | run.name
output_dir save_dir save_path default_local_dir log_dir logging_dir | run.dir
ckpt_dir checkpoint_dir ckpt_path | checkpoint.dir
save_steps save_freq save_interval save_every ckpt_interval checkpoint_interval checkpoint_every
  | checkpoint.every_versions | a version is learner.steps_per_version steps
save_total_limit max_ckpt_num max_ckpts keep_last max_checkpoints | checkpoint.keep
resume_from_checkpoint resume_from resume_mode load_checkpoint | | it is the flag --resume auto, or --resume PATH
eval_steps eval_freq test_freq eval_interval eval_every evaluation_strategy eval_strategy | eval.NAME.every_versions
  | a version is learner.steps_per_version steps
logging_steps log_freq log_interval log_every | | every step is logged
log_level verbosity | log.level
wandb_project project project_name | sinks.wandb.project
wandb_entity | sinks.wandb.entity
use_wandb report_to logger wandb wandb_mode | sinks.wandb.mode
tensorboard_dir use_tensorboard tensorboard | sinks.tensorboard
"""
"""Rows ``names | keys | note``; an indented line continues the row above."""
_ROWS = [
    [part.strip() for part in f"{row}||".split("|")[:3]]
    for row in _TABLE.strip().replace("\n  ", " ").splitlines()
    if not row.startswith("#")
]
_MEANINGS = {name: Meaning(tuple(keys.split()), note) for names, keys, note in _ROWS for name in names.split()}
NAMES = tuple(name for names, _, _ in _ROWS for name in names.split())
"""All names of the table; a name that is in the table twice by mistake occurs twice."""
