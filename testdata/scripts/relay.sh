# kubectl port-forward to a server that listens on this machine's loopback only, as
# notebooks do: joins standard input and output with it. The end of the input is
# passed on, and the answer may still come; the end of the answer is the end.
# What is there of these does it; with bash the end of the input is not passed on.
if command -v python3 >/dev/null; then
	exec python3 -c '
import os, socket, sys, threading
try:
    s = socket.create_connection(("localhost", int(sys.argv[1])))
except OSError as e:
    sys.exit("connect: %s" % e)
def send():
    try:
        while True:
            b = os.read(0, 65536)
            if not b:
                break
            s.sendall(b)
        s.shutdown(socket.SHUT_WR)
    except OSError:
        pass
threading.Thread(target=send, daemon=True).start()
while True:
    b = s.recv(65536)
    if not b:
        break
    sys.stdout.buffer.write(b)
    sys.stdout.buffer.flush()
os._exit(0)
' "$1"
elif command -v perl >/dev/null; then
	exec perl -e '
use Socket;
my $s;
socket($s, PF_INET, SOCK_STREAM, 0) && connect($s, sockaddr_in($ARGV[0], INADDR_LOOPBACK)) or die "connect: $!\n";
sub pass {
    my ($from, $to) = @_;
    while (sysread($from, my $b, 65536)) {
        for (my $n = 0; $n < length $b;) { $n += syswrite($to, $b, length($b) - $n, $n) // return; }
    }
}
my $child = fork;
if (!$child) { pass(\*STDIN, $s); shutdown($s, 1); exit }
pass($s, \*STDOUT);
kill 9, $child;
' "$1"
elif command -v socat >/dev/null; then
	exec socat -t 60 - "TCP:127.0.0.1:$1"
elif command -v ncat >/dev/null; then
	exec ncat 127.0.0.1 "$1"
elif command -v bash >/dev/null; then
	exec bash -c '
exec 3<>"/dev/tcp/127.0.0.1/$1" 4<&0 || exit
cat <&4 >&3 &
cat <&3
kill $!
' bash "$1" 2>/dev/null
fi
echo "the compute node has none of python3, perl, socat, ncat and bash" >&2
exit 127
