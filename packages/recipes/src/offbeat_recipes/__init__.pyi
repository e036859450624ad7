from .cli.trainer import Result as Result, ShownPlan as ShownPlan, Trainer as Trainer, plan as plan
from .errors import (
    DataError as DataError,
    RecipeError as RecipeError,
    RunFailed as RunFailed,
    RunFolderError as RunFolderError,
    RunRefused as RunRefused,
    SettingError as SettingError,
    TaskError as TaskError,
)
from .planning.facts import Facts as Facts, gather_facts as gather_facts
from .planning.plan import Plan as Plan, plan_run as plan_run
from .settings.reading import parse as parse, to_dict as to_dict
from .settings.tree import RunConfig as RunConfig
from .tasks.base import RunnableTask as RunnableTask, make_task as make_task
from .tasks.config import GeneratedConfig as GeneratedConfig, TaskConfig as TaskConfig
from .tasks.generated import GeneratedTask as GeneratedTask
