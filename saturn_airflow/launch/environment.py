"""Which environment variables processes that run users' code get: by an allow-list.

A worker of Airflow's has the deployment's keys in its environment (of tokens, of connections, of the
database), and users' code needs none of them. What it does need, such as the settings of CUDA, of clouds
and of libraries, is listed here; ``[saturn] pass_environment`` adds to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import translate

#: Patterns that are passed on besides those below, with commas between them.
VARIABLE = "SATURN_PASS_ENVIRONMENT"

_SYSTEM = (
    "PATH HOME USER LOGNAME SHELL PWD LANG LANGUAGE LC_* TZ TZDIR TERM COLUMNS LINES NO_COLOR HOSTNAME "
    "TMPDIR TEMP TMP XDG_* VIRTUAL_ENV* CONDA_* PYTHON* LD_* LIBRARY_PATH CPATH C_INCLUDE_PATH "
    "CPLUS_INCLUDE_PATH PKG_CONFIG_PATH CC CXX CFLAGS CXXFLAGS LDFLAGS MAX_JOBS SSL_CERT_* "
    "REQUESTS_CA_BUNDLE CURL_CA_BUNDLE *_PROXY *_proxy"
)
_COMPUTING = (
    "CUDA* NVIDIA_* NCCL_* GLOO_* CUBLAS* CUDNN* TORCH* PYTORCH_* INDUCTOR_* TRITON_* OMP_* MKL_* KMP_* "
    "GOMP_* OPENBLAS_* BLIS_* NUMEXPR_* NUMBA_* MALLOC_* TCMALLOC_* JEMALLOC_* UCX_* UCC_* FI_* IB_* "
    "OMPI_* SLURM_* HIP_* HSA_* ROCM_* ROCR_* AMD_* XLA_* PJRT_* JAX_* TF_* KERAS_* ACCELERATE_* DS_* "
    "DEEPSPEED_* XFORMERS_* FLASH_* RDMAV_*"
)
_LIBRARIES = (
    "HF_* HUGGINGFACE_* HUGGING_FACE_* TRANSFORMERS_* DATASETS_* TOKENIZERS_* DIFFUSERS_* "
    "SENTENCE_TRANSFORMERS_* SAFETENSORS_* PEFT_* BITSANDBYTES_* BNB_* TIKTOKEN_* NLTK_DATA SPACY_* "
    "GENSIM_* SKLEARN_* SCIKIT_LEARN_* SCIPY_* JOBLIB_* NPY_* NUMPY_* MPLBACKEND MPLCONFIGDIR OPENCV_* "
    "IMAGEIO_* ARROW_* PARQUET_* POLARS_* PYARROW_* RAY_* DASK_* LIGHTNING_* PL_* USE_* WANDB_* COMET_* "
    "NEPTUNE_* CLEARML_* TENSORBOARD_* MLFLOW_* KAGGLE_* OTEL_*"
)
_CLOUDS = (
    "AWS_* BOTO* S3_* MINIO_* GOOGLE_* GCLOUD_* CLOUDSDK_* GCS_* GCE_* AZURE_* IDENTITY_* MSI_* FSSPEC_* "
    "KRB5* HADOOP_* ALIBABA_* OCI_* DATABRICKS_* KUBERNETES_*"
)
_SATURNS = "SATURN_* AIRFLOW__SATURN__* AIRFLOW_HOME AIRFLOW_CTX_*"
#: What is passed on by default, as patterns of names.
DEFAULT = tuple(f"{_SYSTEM} {_COMPUTING} {_LIBRARIES} {_CLOUDS} {_SATURNS}".split())

# Airflow's own, and those of shells and service managers: nobody misses them in training.
_NOT_MISSED = (
    "AIRFLOW__* _AIRFLOW_* __AIRFLOW_* AIRFLOW_[!CV]* SUPERVISOR_* CELERY_* C_FORCE_ROOT _ SHLVL OLDPWD "
    "LS_COLORS LESS* MAIL EDITOR VISUAL PAGER DISPLAY WAYLAND_* DBUS_* SSH_* SUDO_* INVOCATION_ID "
    "JOURNAL_STREAM NOTIFY_SOCKET SYSTEMD_* MANAGERPID LISTEN_* MEMORY_PRESSURE_* GPG_* GUNICORN_* "
    "SERVER_SOFTWARE PIP_* DEBIAN_FRONTEND CI GITHUB_* FORKED_BY_MULTIPROCESSING PYTEST_*"
)


def for_users_code(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The variables that users' code gets.

    :param environment: a worker's variables.
    :returns: those, and the names of variables that were kept back and somebody might miss.
    """
    more = _any_of(pattern.strip() for pattern in environment.get(VARIABLE, "").split(","))
    passed = {name: value for name, value in environment.items() if _PASSED.match(name) or more.match(name)}
    missed = [name for name in environment if name not in passed and not _EXPECTED.match(name)]
    return passed, sorted(missed)


def told(names: list[str]) -> str:
    """That these variables were kept back, as a sentence with the way out; empty for none."""
    if not names:
        return ""
    return (
        f"kept from the code of jobs, variables of the worker: {', '.join(names)}; what jobs need "
        "of them goes into [saturn] pass_environment"
    )


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """What matches names that any of the patterns does; an empty pattern matches no name."""
    return re.compile("|".join(map(translate, patterns)))


# Two hundred patterns: to compile them takes longer than to start a run, which each task does.
_PASSED = _any_of(DEFAULT)
_EXPECTED = _any_of(_NOT_MISSED.split())
