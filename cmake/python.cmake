# What makes warm calls from PyTorch cheap: a Python extension in the stable ABI, one for all
# versions from 3.10 on, beside the library. Without Python's headers there is none, and the
# package calls by ctypes.
add_custom_target(saccade_python)
if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CROSSCOMPILING AND NOT SACCADE_SANITIZE)
  find_package(Python3 3.10 QUIET COMPONENTS Interpreter Development.Module)
  if(Python3_Development.Module_FOUND)
    add_library(saccade_warm MODULE python/warm_calls.c)
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
