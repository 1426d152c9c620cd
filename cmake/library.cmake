# The library: all folders of src/ compiled once into objects, made into libsaccade.a and .so.
# Conventions: src/<folder>/*.c is taken as it is; src/{cpu/*,eval,measure}/<name>_tmpl.c is
# compiled once per instruction-set level, with LEVEL=<level> (for pasting into names) and
# LEVEL_<LEVEL>=1.
file(GLOB LIBRARY_SOURCES CONFIGURE_DEPENDS src/*/*.c src/cpu/*/*.c src/cuda/*/*.c)
file(GLOB TEMPLATE_SOURCES CONFIGURE_DEPENDS src/cpu/*/*_tmpl.c src/eval/*_tmpl.c
     src/measure/*_tmpl.c)
list(REMOVE_ITEM LIBRARY_SOURCES "" ${TEMPLATE_SOURCES})
file(GLOB PRELUDE_FILES CONFIGURE_DEPENDS src/mod/prelude.sac)
file(GLOB KERN_FILES CONFIGURE_DEPENDS src/base/dtype_numbers.h src/mod/arith.h
     src/mod/dropout.h src/kv/append.h src/plan/prefix_lists.h
     src/cuda/kern/*.cu src/cuda/kern/*.cuh src/cuda/kern/*.h)
set(EMBEDDED_SOURCES "")
saccade_layout(${GENERATED}/layout_table.h ${CMAKE_CURRENT_SOURCE_DIR}/include/saccade.h
               ${CMAKE_CURRENT_SOURCE_DIR}/include/saccade_measure.h
               ${CMAKE_CURRENT_SOURCE_DIR}/include/saccade_dist.h
               ${CMAKE_CURRENT_SOURCE_DIR}/include/saccade_kv.h)
saccade_embed(EMBEDDED_SOURCES mod_prelude_files ${PRELUDE_FILES})
saccade_embed(EMBEDDED_SOURCES cuda_kern_files ${KERN_FILES})

# What a user of the library compiles and links with.
add_library(saccade_usage INTERFACE)
target_include_directories(saccade_usage INTERFACE
  $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/include>)
# What its own sources compile with, besides.
add_library(saccade_internal INTERFACE)
target_include_directories(saccade_internal INTERFACE ${CMAKE_CURRENT_SOURCE_DIR}/src
  ${GENERATED})
target_link_libraries(saccade_internal INTERFACE saccade_flags saccade_usage)
# What it needs at link time.
set(LIBRARY_NEEDS m ${CMAKE_DL_LIBS})
find_package(Threads REQUIRED)
list(APPEND LIBRARY_NEEDS Threads::Threads)
foreach(part ZYDIS PNG)
  if(HAVE_${part})
    target_link_libraries(saccade_internal INTERFACE saccade_${part})
    list(APPEND LIBRARY_NEEDS ${${part}_LINK})
  endif()
endforeach()

# Strips of scores and kernels live from vectorised loops. No flag here changes a value:
# trapping-math only keeps exception flags, which nothing reads.
set(LOOP_FLAGS -O3 -fno-trapping-math)
if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
  list(APPEND LOOP_FLAGS -Wno-psabi) # vectors wider than the level's, between inlined functions
endif()
if(CMAKE_C_COMPILER_ID STREQUAL "Clang"
   AND (SACCADE_SANITIZE OR CMAKE_BUILD_TYPE STREQUAL "Debug"))
  list(APPEND LOOP_FLAGS -Wno-pass-failed) # instrumented loops need not become vectors
endif()
if(CMAKE_BUILD_TYPE STREQUAL "Debug")
  list(REMOVE_ITEM LOOP_FLAGS -O3)
elseif(SACCADE_SANITIZE)
  list(TRANSFORM LOOP_FLAGS REPLACE "^-O3$" "-O1") # compiled in less than half the time
endif()
# Before 13.3 GCC keeps 64-byte vectors aligned in frames that the address sanitizer aligns to
# 32 (GCC bug 110027): their levels go without those frames, and without use after return.
set(WIDE_FLAGS "")
if(CMAKE_C_COMPILER_ID STREQUAL "GNU" AND CMAKE_C_COMPILER_VERSION VERSION_LESS 13.3
   AND SACCADE_SANITIZE MATCHES "address")
  set(WIDE_FLAGS --param=asan-use-after-return=0)
endif()
foreach(source IN LISTS LIBRARY_SOURCES)
  if(source MATCHES "/src/(cpu|eval|measure)/|/src/base/convert.c$|/src/ref/plain.c$")
    set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${LOOP_FLAGS}")
  endif()
endforeach()

# What the ladder times is scalar code, and so is the limit it is drawn under.
set_source_files_properties(src/ref/ladder_timed.c src/ref/roofline.c PROPERTIES
  COMPILE_OPTIONS "-fno-tree-vectorize;-fno-tree-slp-vectorize")

add_library(saccade_objects OBJECT ${LIBRARY_SOURCES} ${EMBEDDED_SOURCES})
target_link_libraries(saccade_objects PRIVATE saccade_internal)
set(OBJECTS $<TARGET_OBJECTS:saccade_objects>)
if(TEMPLATE_SOURCES)
  foreach(level IN LISTS LEVELS)
    string(TOUPPER ${level} LEVEL_NAME)
    add_library(saccade_cpu_${level} OBJECT ${TEMPLATE_SOURCES})
    target_compile_options(saccade_cpu_${level} PRIVATE ${LOOP_FLAGS} ${LEVEL_FLAGS_${level}})
    if(level MATCHES "^(avx512|amx)$")
      target_compile_options(saccade_cpu_${level} PRIVATE ${WIDE_FLAGS})
    endif()
    target_compile_definitions(saccade_cpu_${level} PRIVATE LEVEL=${level}
                               LEVEL_${LEVEL_NAME}=1)
    target_link_libraries(saccade_cpu_${level} PRIVATE saccade_internal)
    list(APPEND OBJECTS $<TARGET_OBJECTS:saccade_cpu_${level}>)
  endforeach()
endif()

# libsaccade.a here keeps internal names, for the tests.
add_library(saccade_static STATIC ${OBJECTS})
add_library(saccade::static ALIAS saccade_static)
set_target_properties(saccade_static PROPERTIES OUTPUT_NAME saccade LINKER_LANGUAGE C)
target_link_libraries(saccade_static PUBLIC saccade_usage PRIVATE ${LIBRARY_NEEDS})

add_library(saccade_shared SHARED ${OBJECTS})
set_target_properties(saccade_shared PROPERTIES OUTPUT_NAME saccade LINKER_LANGUAGE C
                      VERSION ${PROJECT_VERSION}
                      SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
target_include_directories(saccade_shared INTERFACE
  $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/include>)
target_link_libraries(saccade_shared PRIVATE saccade_flags ${LIBRARY_NEEDS})
set_target_properties(saccade_shared PROPERTIES EXPORT_NAME saccade)
add_library(saccade::saccade ALIAS saccade_shared)
# Ranks that are MPI processes: a library of its own, so that the other needs no MPI.
if(HAVE_MPI)
  add_library(saccade_mpi SHARED src/dist/mpi/mpi_transport.c)
  set_target_properties(saccade_mpi PROPERTIES LINKER_LANGUAGE C VERSION ${PROJECT_VERSION}
                        SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  target_link_libraries(saccade_mpi PUBLIC saccade_usage MPI::MPI_C PRIVATE saccade_flags)
endif()
if(UNIX AND NOT APPLE)
  set(EXPORTS ${CMAKE_CURRENT_SOURCE_DIR}/cmake/exports.map)
  target_link_options(saccade_shared PRIVATE -Wl,--version-script=${EXPORTS})
  set_target_properties(saccade_shared PROPERTIES LINK_DEPENDS ${EXPORTS})
endif()
