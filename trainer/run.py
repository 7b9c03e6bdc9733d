"""The parts of one training run, wired together: what TRL calls back into, and what outlives its loop."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from rollout.engine import EngineSpec, spec_per_worker
from rollout.placement import ray_session
from rollout.pool import RolloutPool
from tlt.config.schema import TrainConfig
from tlt.errors import TltError
from tlt.observability.json_files import write_json_atomic
from tlt.observability.phases import Phase, PhaseClock
from tlt.observability.progress import Progress, open_view
from tlt.observability.run_folder import RunFolder
from tlt.observability.sinks import MetricsWriter, open_metrics
from tlt.observability.summary import RunSummary, edge_means, paired_stderr
from tlt.observability.timeline import TimelineWriter
from tlt.types import SamplingSpec
from trainer.data import PromptItem, PromptSet, train_dataset
from trainer.evaluate import Evaluation, evaluate
from trainer.inputs import RunInputs
from trainer.learner import PoolGRPOTrainer, StepMetrics, build_learner
from trainer.learner_metrics import learner_metrics
from trainer.policy import save_policy
from trainer.policy_state import policy_key, policy_store
from trainer.rewards import RewardRunner
from trainer.rollout_driver import RolloutDriver
from trainer.training_rewards import TrainingRewards
from trainer.trl_adapter import Prompt
from trainer.weight_probe import WeightProbe

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 256


class TrainingRun:
    """A run in progress. Everything that it starts closes with the stack that it was given."""

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        inputs: RunInputs,
        clock: PhaseClock,
        progress: Progress,
        metrics: MetricsWriter,
        runner: RewardRunner,
        pool: RolloutPool,
        timeline: TimelineWriter,
    ) -> None:
        self._config = config
        self._folder = folder
        self._inputs = inputs
        self._clock = clock
        self._progress = progress
        self._metrics = metrics
        self._runner = runner
        self._driver = RolloutDriver(
            pool,
            clock=clock,
            progress=progress,
            timeline=timeline,
            probe=WeightProbe(_probe_text(inputs.prompts, config.rollout.max_model_len)),
        )
        self._index = inputs.prompts.index()
        self._rewards = TrainingRewards(runner, self._index, clock=clock, progress=progress, folder=folder)
        self._trainer: PoolGRPOTrainer = build_learner(
            config,
            model_path=inputs.model_path,
            tokenizer=inputs.tokenizer,
            dataset=train_dataset(inputs.prompts.train),
            source=self._driver,
            reward_func=self._rewards,
            output_dir=folder.checkpoints_dir,
            callbacks=[StepMetrics(self._end_step)],
            encode=self._encode,
        )
        self._driver.attach(self._trainer.model)
        self._evaluations: list[Evaluation] = []
        self.completed = False
        """Every step and the last evaluation are done."""
        self.summary: RunSummary | None = None
        """What :meth:`save` has written."""

    @classmethod
    def start(
        cls,
        stack: ExitStack,
        config: TrainConfig,
        folder: RunFolder,
        inputs: RunInputs,
        clock: PhaseClock,
        console: Console,
    ) -> TrainingRun:
        """Start what the run needs: scoring processes, Ray, workers, learner."""
        with clock.phase(Phase.START):
            metrics = stack.enter_context(open_metrics(folder, config.logging, config.model_dump(mode="json")))
            timeline = stack.enter_context(TimelineWriter(folder.timeline_path))
            source = config.data.source
            tasks = source.tasks if source.kind == "reasoning_gym" else None
            runner = stack.enter_context(RewardRunner(config.rewards, tasks=tasks))
            stack.enter_context(ray_session())
            logger.info("starting %d rollout workers", config.rollout.num_workers)
            pool = stack.enter_context(
                RolloutPool.start(config.rollout, _engine_specs(config, inputs), dtype=config.model.dtype)
            )
            progress = stack.enter_context(
                Progress(open_view(console), num_steps=config.learner.max_steps, num_workers=config.rollout.num_workers)
            )
            run = cls(config, folder, inputs, clock, progress, metrics, runner, pool, timeline)
            run._driver.prove_updates(run._trainer.vllm_generation)
        return run

    def train(self) -> None:
        """All steps."""
        self._begin_step(1)
        with self._clock.phase(Phase.LEARN):
            self._trainer.train()
        done, asked = self._trainer.state.global_step, self._config.learner.max_steps
        if done < asked:
            raise TltError(f"training ended after {done} of {asked} steps; the trainer found no more prompts")

    def evaluate(self) -> None:
        """Greedy evaluation of the policy as it is now, on the held-out prompts."""
        items = self._inputs.prompts.eval
        if not items:
            return
        self._trainer.sync_weights()
        section = self._config.rollout
        sampling = SamplingSpec(max_tokens=section.max_completion_length, temperature=0.0, stop=section.stop)
        step = self._trainer.state.global_step
        with self._clock.phase(Phase.EVAL):
            evaluation = evaluate(
                self._driver.evaluate,
                items,
                sampling=sampling,
                step=step,
                path=self._folder.responses_dir / f"eval-{step:06d}.jsonl",
                tokenizer=self._inputs.tokenizer,
                runner=self._runner,
                rewards=self._config.rewards,
            )
        self._evaluations.append(evaluation)
        result = evaluation.result
        self._metrics.write(
            step,
            {
                "eval/accuracy": result.accuracy,
                "eval/format_rate": result.format_rate,
                "eval/accuracy_any_format": result.accuracy_any_format,
                "eval/reward": result.reward,
                "eval/mean_tokens": result.mean_tokens,
            },
        )
        logger.info(
            "evaluation after step %d: accuracy %.3f (any format %.3f), boxed %.3f; greedy, %d held-out prompts",
            step,
            result.accuracy,
            result.accuracy_any_format,
            result.format_rate,
            result.num_prompts,
        )

    def save_policy_state(self) -> None:
        """Keep what the speculation policy has learned about this machine for the next run."""
        config = self._config
        if not config.draft.adaptive:
            return
        state = self._driver.policy_state()
        if state is not None:
            policy_store().save(state, *policy_key(config.model.name, config.rollout, config.draft))

    def save(self) -> None:
        """Write policy and summary; also of a run that failed, once a step is done."""
        with self._clock.phase(Phase.SAVE):
            try:
                if self.completed or self._trainer.state.global_step > 0:
                    save_policy(
                        self._trainer.model, self._inputs.tokenizer, self._folder.policy_dir, self._config.model.dtype
                    )
            finally:
                self.summary = self._summarise()
                write_json_atomic(self._folder.summary_path, self.summary.to_json())

    def _summarise(self) -> RunSummary:
        before = self._evaluations[0] if self._evaluations else None
        after = self._evaluations[-1] if len(self._evaluations) > 1 else None
        reward_first5, reward_last5 = edge_means(self._rewards.history)
        driver = self._driver
        return RunSummary(
            completed=self.completed,
            eval_before=before.result if before else None,
            eval_after=after.result if after else None,
            eval_stderr=_stderr(before, after),
            reward_first5=reward_first5,
            reward_last5=reward_last5,
            steps=self._trainer.state.global_step,
            tokens_per_s=driver.num_tokens / driver.generate_s if driver.generate_s else 0.0,
            breakdown_s=self._clock.breakdown_s(),
            idle_s={f"worker-{rank}": seconds for rank, seconds in enumerate(driver.idle_s)},
            responses=driver.num_responses,
            workers=self._config.rollout.num_workers,
            policy_version=driver.policy_version,
            files=_files(self._folder),
        )

    def _encode(self, prompt: Prompt) -> PromptItem:
        assert not isinstance(prompt, str), "prompts of a run are messages"
        return self._index[prompt]

    def _begin_step(self, step: int) -> None:
        self._driver.step = self._rewards.step = step
        self._progress.begin_step(step)

    def _end_step(self, step: int, logged: dict[str, float]) -> None:
        """TRL has finished a step."""
        self._metrics.write(step, self._driver.metrics | self._rewards.metrics | learner_metrics(logged))
        # With several iterations per rollout, the next step may have no rollout of its own to report.
        self._driver.metrics, self._rewards.metrics = {}, {}
        self._progress.end_step(self._rewards.history[-1])
        if step == self._config.learner.max_steps:
            return
        if self._config.eval.every and step % self._config.eval.every == 0:
            self.evaluate()
        self._begin_step(step + 1)


def _stderr(before: Evaluation | None, after: Evaluation | None) -> float | None:
    if before is None or after is None or len(before.correct) < 2:
        return None
    return paired_stderr(before.correct, after.correct)


def _probe_text(prompts: PromptSet, max_model_len: int) -> list[int]:
    """Some prompts in a row: the more tokens, the smaller the updates that the weight probe can judge."""
    tokens = [token for item in prompts.train[:8] for token in item.token_ids]
    # The engine generates one token behind the text that it scores.
    return tokens[: min(_PROBE_TOKENS, max_model_len - 1)]


def _engine_specs(config: TrainConfig, inputs: RunInputs) -> list[EngineSpec]:
    policy_state = None
    if config.draft.adaptive:
        policy_state = policy_store().load(*policy_key(config.model.name, config.rollout, config.draft))
    spec = EngineSpec(
        model_path=inputs.model_path,
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
        draft=config.draft,
        draft_path=inputs.draft_path,
        policy_state=policy_state,
        seed=config.run.seed,
        section=config.rollout,
    )
    return spec_per_worker(spec, config.rollout.num_workers)


def _files(folder: RunFolder) -> dict[str, str]:
    paths: dict[str, Path] = {
        "run": folder.root,
        "policy": folder.policy_dir,
        "metrics": folder.metrics_path,
        "responses": folder.responses_dir,
        "summary": folder.summary_path,
    }
    return {name: str(path) for name, path in paths.items()}
