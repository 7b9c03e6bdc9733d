"""Configuration: the schemas, and the way from files and flags to one checked, frozen object.

:mod:`tlt.config.schema` and :mod:`tlt.config.sft_schema` say what may be written; :mod:`tlt.config.loader`
reads it (default < file < flag), with :mod:`tlt.config.yaml_text` for the text and :mod:`tlt.config.problems`
for the wording of what is wrong.
"""

from tlt.config.loader import dump_config, load_config, schema_of
from tlt.config.schema import TrainConfig
from tlt.config.sft_schema import SftConfig

__all__ = ["SftConfig", "TrainConfig", "dump_config", "load_config", "schema_of"]
