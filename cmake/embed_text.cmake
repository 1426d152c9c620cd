# Script: writes OUTPUT, a C source with the texts of FILES in one table named TABLE.
string(REPLACE "'" "" FILES "${FILES}")
set(body "")
foreach(file IN LISTS FILES)
  get_filename_component(name ${file} NAME)
  file(SIZE ${file} bytes)
  file(READ ${file} text)
  string(REPLACE "\\" "\\\\" text "${text}")
  string(REPLACE "\"" "\\\"" text "${text}")
  string(REPLACE "\n" "\\n\"\n\"" text "${text}")
  string(APPEND body "{\"${name}\",\n\"${text}\",\n${bytes}},\n")
endforeach()
file(WRITE ${OUTPUT} "#include \"base/embed.h\"\n\n"
     "const embedded_text ${TABLE}[] = {\n${body}{NULL, NULL, 0}};\n")
