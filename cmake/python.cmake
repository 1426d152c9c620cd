# What makes warm calls from PyTorch cheap: a Python extension in the stable ABI, one for all
# versions from 3.10 on, beside the library. Without Python's headers, or for a Python without
# the GIL, which has no such ABI, there is none, and the package calls by ctypes.
add_custom_target(saccade_python)
if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CROSSCOMPILING AND NOT SACCADE_SANITIZE)
  find_package(Python3 3.10 QUIET COMPONENTS Interpreter Development.Module)
  set(PYTHON_HAS_NO_GIL 0)
  if(Python3_Interpreter_FOUND)
    execute_process(COMMAND ${Python3_EXECUTABLE} -c
                    "import sysconfig; print(sysconfig.get_config_var('Py_GIL_DISABLED') or 0)"
                    OUTPUT_VARIABLE PYTHON_HAS_NO_GIL OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
  if(Python3_Development.Module_FOUND AND NOT PYTHON_HAS_NO_GIL)
    file(GLOB WARM_FILES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/python/warm/*.c)
    add_library(saccade_warm MODULE ${WARM_FILES})
    target_include_directories(saccade_warm SYSTEM PRIVATE ${Python3_INCLUDE_DIRS})
    target_link_libraries(saccade_warm PRIVATE saccade_flags)
    set_target_properties(saccade_warm PROPERTIES PREFIX "" SUFFIX .abi3.so
                          LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
    add_dependencies(saccade_python saccade_warm)
    if(SKBUILD)
      install(TARGETS saccade_warm LIBRARY DESTINATION . COMPONENT python)
    endif()
  endif()
endif()
