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
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS saccade_shared LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES ${ARCHIVE} DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET saccade_mpi)
  install(FILES include/saccade_mpi.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(TARGETS saccade_mpi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
if(TARGET saccade_program)
  install(TARGETS saccade_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

# What a static link needs besides, as linker words.
set(STATIC_NEEDS -lm -ldl -lpthread)
foreach(part ZYDIS PNG)
  if(HAVE_${part})
    list(APPEND STATIC_NEEDS ${${part}_LIBRARY})
  endif()
endforeach()
list(JOIN STATIC_NEEDS " " STATIC_NEEDS_WORDS)

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
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/saccade-config.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/saccade-config-version.cmake
        DESTINATION ${PACKAGE_DIR})

# Python wheels take the library alone, beside the package (python/pyproject.toml).
if(SKBUILD)
  set_property(TARGET saccade_shared PROPERTY VERSION)
  set_property(TARGET saccade_shared PROPERTY SOVERSION)
  install(TARGETS saccade_shared LIBRARY DESTINATION . COMPONENT python)
  install(FILES LICENSE DESTINATION ${SKBUILD_METADATA_DIR}/licenses COMPONENT python)
endif()
