# Installed tree: header, both libraries, program, CMake package, pkg-config file.
install(FILES include/saccade.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
