package main

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"
)

func TestFreePortsAreFreeAndDistinct(t *testing.T) {
	var taken []error
	for range 5 { // others may take a port just then
		ports, err := freePorts("127.0.0.1", 40)
		if err != nil {
			t.Fatal(err)
		}
		slices.Sort(ports)
		if len(slices.Compact(slices.Clone(ports))) != 40 {
			t.Errorf("some of the ports are the same: %v", ports)
		}
		taken = nil
		for _, port := range ports {
			listener, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
			if err != nil {
				taken = append(taken, err)
				continue
			}
			listener.Close()
		}
		if len(taken) == 0 {
			return
		}
	}
	t.Errorf("ports are not free: %v", taken)
}

func TestOnlyAPipeBindsUsToAParent(t *testing.T) {
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	if !isPipe(reader) {
		t.Error("a pipe is not taken for one")
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if isPipe(null) {
		t.Error("/dev/null is taken for a pipe")
	}

	ended := make(chan struct{})
	go func() { waitForEOF(reader); close(ended) }()
	if _, err := writer.WriteString("not the end"); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ended:
		t.Fatal("data is taken for the end")
	case <-time.After(20 * time.Millisecond):
	}
	writer.Close()
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Fatal("the end is not noticed")
	}
}

func TestWriteFileAtomicallyReplaces(t *testing.T) {
	path := filepath.Join(t.TempDir(), "address")
	for _, text := range []string{"a rather long first text\n", "short\n"} {
		if err := writeFileAtomically(path, text); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != text {
			t.Errorf("the file holds %q, %v", got, err)
		}
	}
	left, err := filepath.Glob(path + ".*")
	if err != nil || len(left) > 0 {
		t.Errorf("temporary files are left: %v", left)
	}
	if err := writeFileAtomically(filepath.Join(path, "below a file"), "x"); err == nil {
		t.Error("an impossible path is no error")
	}
}
