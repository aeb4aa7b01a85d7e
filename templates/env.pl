# perl env.pl - PROGRAM ARGUMENT…     becomes the container runtime
# perl env.pl PID NSENTER PROGRAM ARGUMENT…   becomes what enters a container
#
# Written by knoc, for variables whose names no shell can assign. As arguments of
# a program their values would be public, so they come in variables of other
# names, KNOC_ENV_ and the name in hexadecimal; or, on the way into a container,
# from its first program; and so do those that a shell does not let go, or that
# mean something to the program that reads this.

use strict;
my $pid = shift @ARGV;

if ($pid eq '-') {
	# What apptainer lets through without --cleanenv is to be the pod's alone.
	$ENV{APPTAINER_TMPDIR} = $ENV{TMPDIR} if defined $ENV{TMPDIR} && !defined $ENV{APPTAINER_TMPDIR};
	for (keys %ENV) {
		delete $ENV{$_} unless /^(PATH|HOME|KNOC_ENV_.*|(APPTAINER|SINGULARITY).*)$/;
	}
	my $own = (grep { /^SINGULARITYENV_/ } keys %ENV) ? 'SINGULARITYENV_USER_PATH' : 'APPTAINERENV_USER_PATH';
	$ENV{$own} = '' unless defined $ENV{$own}; # the runtime's copy of this PATH
	for (grep { /^KNOC_ENV_/ } keys %ENV) {
		my $value = delete $ENV{$_};
		$ENV{pack 'H*', substr $_, 9} = $value;
	}
	for my $i (0 .. $#ARGV) {
		next if $ARGV[$i] ne '--containall';
		splice @ARGV, $i, 1, '--contain', '--ipc', '--pid';
		last;
	}
} else {
	my ($nsenter, $file) = shift @ARGV;
	open($file, '<', "/proc/$pid/environ")
		or open($file, '-|', $nsenter, '-U', '-t', $pid, '--', 'cat', "/proc/$pid/environ")
		or die "knoc: the environment of process $pid cannot be read: $!\n";
	local $/ = "\0";
	while (<$file>) {
		chomp;
		my ($name, $value) = split /=/, $_, 2;
		next if !defined $value;
		next if $name =~ /^[A-Za-z_][A-Za-z0-9_]*$/
			&& $name !~ /^(BASHOPTS|BASH_VERSINFO|EUID|OPTIND|PPID|SHELLOPTS|UID|PERL[A-Z0-9_]*|PYTHON[A-Z0-9_]*)$/;
		$ENV{$name} = $value;
	}
	close $file;
}
exec { $ARGV[0] } @ARGV or print STDERR "knoc: $ARGV[0]: $!\n";
exit 125;
