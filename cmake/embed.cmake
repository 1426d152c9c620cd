# saccade_embed(OUTPUT_VARIABLE TABLE FILE...): adds to the variable the path of a generated C
# source that defines `const embedded_text TABLE[]` (src/base/embed.h) with the files' texts.
function(saccade_embed variable table)
  set(source ${GENERATED}/${table}.c)
  add_custom_command(
    OUTPUT ${source}
    COMMAND ${CMAKE_COMMAND} -DTABLE=${table} -DOUTPUT=${source} "-DFILES='${ARGN}'"
            -P ${CMAKE_CURRENT_SOURCE_DIR}/cmake/embed_text.cmake
    DEPENDS ${ARGN} ${CMAKE_CURRENT_SOURCE_DIR}/cmake/embed_text.cmake
    COMMENT "Embedding ${table}" VERBATIM)
  set(${variable} ${${variable}} ${source} PARENT_SCOPE)
endfunction()
