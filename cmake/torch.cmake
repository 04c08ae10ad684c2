# Finds the PyTorch wheel of SMARTINF_PYTHON (default: .venv, else python3) and declares the target
# smartinf_torch. Sets SMARTINF_TORCH_FOUND.
if(NOT SMARTINF_PYTHON)
  if(DEFINED ENV{VIRTUAL_ENV} AND EXISTS $ENV{VIRTUAL_ENV}/bin/python)
    set(_python $ENV{VIRTUAL_ENV}/bin/python)
  elseif(EXISTS ${PROJECT_SOURCE_DIR}/.venv/bin/python)
    set(_python ${PROJECT_SOURCE_DIR}/.venv/bin/python)
  else()
    find_program(_python_found NAMES python3)
    set(_python ${_python_found})
  endif()
  set(SMARTINF_PYTHON ${_python} CACHE FILEPATH "The Python whose torch wheel is used")
endif()

set(_torch_dir "")
if(SMARTINF_PYTHON)
  execute_process(
    COMMAND ${SMARTINF_PYTHON} -c
      "import importlib.util as u; s = u.find_spec('torch'); print(list(s.submodule_search_locations)[0] if s else '')"
    OUTPUT_VARIABLE _torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(_torch_dir AND EXISTS ${_torch_dir}/include/torch/csrc/api/include/torch/torch.h)
  set(SMARTINF_TORCH_FOUND ON)
  set(SMARTINF_TORCH_DIR ${_torch_dir})
  add_library(smartinf_torch INTERFACE)
  target_include_directories(smartinf_torch SYSTEM INTERFACE
    ${_torch_dir}/include ${_torch_dir}/include/torch/csrc/api/include)
  target_link_directories(smartinf_torch INTERFACE ${_torch_dir}/lib)
  # Backends of GPUs are not linked: train/accelerator.cc loads that of the GPU that is there, so that one
  # binary serves machines with and without one.
  target_link_options(smartinf_torch INTERFACE -Wl,-rpath,${_torch_dir}/lib)
  target_link_libraries(smartinf_torch INTERFACE torch_cpu c10)
  # torch's header of process groups over gloo includes gloo's, which the wheel does not have.
  if(NOT EXISTS ${_torch_dir}/include/gloo/context.h)
    set(_gloo ${PROJECT_BINARY_DIR}/gloo_names)
    foreach(_name algorithm common/error context rendezvous/store transport/device)
      file(CONFIGURE OUTPUT ${_gloo}/gloo/${_name}.h
        CONTENT "#include \"${PROJECT_SOURCE_DIR}/smartinf/train/ranks/gloo_names.h\"\n")
    endforeach()
    target_include_directories(smartinf_torch SYSTEM INTERFACE ${_gloo})
  endif()
  message(STATUS "torch: ${_torch_dir}")
elseif(SMARTINF_TORCH STREQUAL "ON")
  message(FATAL_ERROR
    "SMARTINF_TORCH=ON but ${SMARTINF_PYTHON} has no torch with headers. Run scripts/setup.sh, or "
    "pass -DSMARTINF_PYTHON=/path/to/python, or -DSMARTINF_TORCH=OFF to build without the trainer.")
else()
  message(STATUS "torch not found: building without the trainer (no `smartinf train`)")
endif()
