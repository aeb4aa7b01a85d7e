# What follows came over SSH from knoc, which runs one script per exchange. It
# answers in frames, `<nonce> <name> <number of bytes>`, a newline, the bytes, a
# newline; anything else on stdout (a banner, say) is ignored. The nonce is new
# each time, so no text that the script merely prints can look like an answer.
LC_ALL=C # ${#2} counts bytes
export LC_ALL
say() { printf '%s %s %d\n%s\n' '@NONCE' "$1" "${#2}" "$2"; }
trap 'say end "$?"' EXIT
