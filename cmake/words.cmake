# The program's manual page and completions, printed by the program itself and installed; left
# out where the program cannot be run while building.
if(CMAKE_CROSSCOMPILING AND NOT CMAKE_CROSSCOMPILING_EMULATOR)
  return()
endif()
set(WORDS_DIR ${CMAKE_CURRENT_BINARY_DIR}/words)
set(WORDS "")
macro(saccade_words file folder) # ARGUMENT...: what the program is called with
  add_custom_command(
    OUTPUT ${WORDS_DIR}/${file}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${WORDS_DIR}
    COMMAND saccade_program ${ARGN} > ${WORDS_DIR}/${file}
    DEPENDS saccade_program VERBATIM)
  list(APPEND WORDS ${WORDS_DIR}/${file})
  install(FILES ${WORDS_DIR}/${file} DESTINATION ${folder})
endmacro()
saccade_words(saccade.1 ${CMAKE_INSTALL_MANDIR}/man1 man)
saccade_words(saccade ${CMAKE_INSTALL_DATADIR}/bash-completion/completions completions bash)
saccade_words(_saccade ${CMAKE_INSTALL_DATADIR}/zsh/site-functions completions zsh)
saccade_words(saccade.fish ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d completions fish)
add_custom_target(saccade_words ALL DEPENDS ${WORDS})
