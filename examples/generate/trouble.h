/* trouble.h: one line that says what is wrong: where, what, got, expected. */
#ifndef GENERATE_TROUBLE_H
#define GENERATE_TROUBLE_H

typedef struct trouble {
    char text[400];
} trouble;

/* Writes the line and returns -1, which every function here returns that failed. */
__attribute__((format(printf, 2, 3))) int refuse(trouble *t, const char *format, ...);

#endif
