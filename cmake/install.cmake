# Installed tree: header, both libraries, program, CMake package, pkg-config file.
# The installed libsaccade.a is one object whose internal names are local, so that it shows
# a user's linker nothing but saccade_*, as the shared library does.
set(ARCHIVE_DIR ${CMAKE_CURRENT_BINARY_DIR}/public)
set(ARCHIVE ${ARCHIVE_DIR}/libsaccade.a)
add_custom_command(
  OUTPUT ${ARCHIVE}
  COMMAND ${CMAKE_COMMAND} -E make_directory ${ARCHIVE_DIR}
  COMMAND ${CMAKE_COMMAND} -E rm -f ${ARCHIVE}
  COMMAND ${CMAKE_C_COMPILER} -r -nostdlib -o ${ARCHIVE_DIR}/saccade.o ${OBJECTS}
  COMMAND ${CMAKE_OBJCOPY} -w --keep-global-symbol=saccade_* ${ARCHIVE_DIR}/saccade.o
  COMMAND ${CMAKE_AR} qcs ${ARCHIVE} ${ARCHIVE_DIR}/saccade.o
  DEPENDS saccade_static ${OBJECTS}
  COMMENT "Archive of public names" COMMAND_EXPAND_LISTS VERBATIM)
add_custom_target(saccade_public_archive ALL DEPENDS ${ARCHIVE})

install(FILES include/saccade.h include/saccade_measure.h include/saccade_dist.h
        include/saccade_kv.h include/saccade_threads.h
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS saccade_shared EXPORT saccade-targets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${ARCHIVE} DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET saccade_mpi)
  install(FILES include/saccade_mpi.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(TARGETS saccade_mpi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
if(TARGET saccade_program)
  install(TARGETS saccade_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

# What a static link needs besides, as linker words. -lsaccade_parts is an ld script beside the
# archive: the .so names the parts that are shared libraries here, and with -static, where those
# cannot be had, the .a puts refusals in their place (absent_parts.c): mods are interpreted.
set(SHARED_PARTS "")
set(STATIC_PARTS "")
set(ABSENT_PARTS "")
foreach(part ZYDIS PNG)
  if(HAVE_${part})
    list(APPEND SHARED_PARTS ${${part}_LIBRARY})
    if(${part}_STATIC)
      list(APPEND STATIC_PARTS ${${part}_STATIC})
    else()
      list(APPEND ABSENT_PARTS ${part})
    endif()
  endif()
endforeach()
set(STATIC_NEEDS -lsaccade_parts -lm -ldl -lpthread)
list(JOIN STATIC_NEEDS " " STATIC_NEEDS_WORDS)
add_library(saccade_absent STATIC ${CMAKE_CURRENT_SOURCE_DIR}/cmake/absent_parts.c)
foreach(part IN LISTS ABSENT_PARTS)
  target_compile_definitions(saccade_absent PRIVATE ABSENT_${part}=1)
  target_link_libraries(saccade_absent PRIVATE $<BUILD_INTERFACE:saccade_${part}>)
endforeach()
install(TARGETS saccade_absent ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
foreach(kind SHARED STATIC)
  set(words "")
  foreach(file IN LISTS ${kind}_PARTS)
    get_filename_component(name ${file} NAME)
    string(REGEX REPLACE "^lib(.*)\\.(so|a)$" "-l\\1" name ${name})
    string(APPEND words " ${name}")
  endforeach()
  set(${kind}_WORDS "${words}")
endforeach()
file(WRITE ${ARCHIVE_DIR}/libsaccade_parts.so
     "/* GNU ld script */\nINPUT(AS_NEEDED(-lm${SHARED_WORDS}))\n")
file(WRITE ${ARCHIVE_DIR}/libsaccade_parts.a
     "/* GNU ld script */\nINPUT(${STATIC_WORDS} -lsaccade_absent)\n")
install(FILES ${ARCHIVE_DIR}/libsaccade_parts.so ${ARCHIVE_DIR}/libsaccade_parts.a
        DESTINATION ${CMAKE_INSTALL_LIBDIR})

# Paths in both files are relative to the files themselves: the tree may be moved.
set(PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/saccade)
file(RELATIVE_PATH PREFIX_FROM_PACKAGE /prefix/${PACKAGE_DIR} /prefix)
file(RELATIVE_PATH PREFIX_FROM_PC /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(cmake/saccade.pc.in saccade.pc @ONLY)
configure_file(cmake/saccade-config.cmake.in saccade-config.cmake @ONLY)
include(CMakePackageConfigHelpers)
write_basic_package_version_file(saccade-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/saccade.pc
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(EXPORT saccade-targets NAMESPACE saccade:: DESTINATION ${PACKAGE_DIR})
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/saccade-config.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/saccade-config-version.cmake
        DESTINATION ${PACKAGE_DIR})

# Python wheels take the library alone, beside the package (python/pyproject.toml), and with it
# the shared libraries of optional parts (distributions' archives of them are seldom fit for a
# shared library). DT_RPATH, which these follow too.
if(SKBUILD)
  set_property(TARGET saccade_shared PROPERTY VERSION)
  set_property(TARGET saccade_shared PROPERTY SOVERSION)
  set_property(TARGET saccade_shared PROPERTY INSTALL_RPATH "$ORIGIN")
  target_link_options(saccade_shared PRIVATE -Wl,--disable-new-dtags)
  install(TARGETS saccade_shared LIBRARY DESTINATION . COMPONENT python)
  install(FILES LICENSE DESTINATION ${SKBUILD_METADATA_DIR}/licenses COMPONENT python)
  foreach(file IN LISTS BUNDLED_LIBRARIES)
    execute_process(COMMAND ${CMAKE_READELF} -d ${file} OUTPUT_VARIABLE dynamic)
    string(REGEX REPLACE ".*soname: \\[([^]]*)\\].*" "\\1" soname "${dynamic}")
    get_filename_component(real ${file} REALPATH)
    install(FILES ${real} DESTINATION . RENAME ${soname} COMPONENT python)
  endforeach()
endif()
