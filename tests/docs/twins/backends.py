"""Twins of what reads models and checkpoints, and of clusters."""

from __future__ import annotations

from tests.docs.twins.twin import Twin

BACKENDS = (
    Twin(
        "tests/backends/megatron/test_model_code.py::test_a_run_refuses_a_model_that_is_built_of_its_directorys_code",
        "backends/anytron_megatron/checks/model.py",
        "if family in COMPOSITES:",
        'if family in COMPOSITES and family != "kimi_k25":',
    ),
    Twin(
        "tests/backends/megatron/checks/test_model.py::test_families_whose_bridge_imports_files_of_the_model_directory_are_those_that_are_refused",
        "backends/anytron_megatron/checks/model.py",
        "if family in COMPOSITES:",
        'if family in COMPOSITES and family != "kimi_k25":',
    ),
    Twin(
        "tests/backends/megatron/test_model_code.py::test_a_training_rank_refuses_it_whoever_asks",
        "backends/anytron_megatron/patches/imports.py",
        "    del original\n",
        "    return original  # type: ignore[return-value]\n",
    ),
    Twin(
        "tests/backends/megatron/checkpoint/test_one_rank.py::test_a_malicious_file_is_refused_and_runs_nothing",
        "backends/anytron_megatron/checkpoint/unpickling.py",
        "found = ALLOWED.get((module_name, global_name))",
        "found = ALLOWED.get((module_name, global_name)) or super().find_class(module_name, global_name)",
    ),
    Twin(
        "tests/backends/megatron/checkpoint/test_one_rank.py::test_a_damaged_file_is_named",
        "backends/anytron_megatron/checkpoint/unpickling.py",
        "    # What a damaged pickle raises depends on where the damage is.\n    except Exception as error:",
        "    except FloatingPointError as error:",
    ),
    Twin(
        "tests/backends/megatron/checks/test_lora.py::test_a_malformed_adapter_is_refused",
        "backends/anytron_megatron/checks/lora.py",
        "if (directory / INDEX).exists():",
        "if False:",
    ),
    Twin(
        "tests/backends/ray/test_ray.py::test_other_machines_get_a_list_of_the_drivers_variables",
        "backends/anytron_ray/executor.py",
        "if name.startswith(prefixes) or name in further}",
        "if name}",
    ),
    Twin(
        "tests/backends/ray/test_ray.py::test_a_cluster_that_a_run_starts_listens_on_the_loopback_interface_alone",
        "backends/anytron_ray/cluster.py",
        "ray_constants.ENABLE_RAY_CLUSTER = False",
        "ray_constants.ENABLE_RAY_CLUSTER = True",
    ),
)
