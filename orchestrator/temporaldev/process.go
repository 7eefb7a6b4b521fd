package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
)

// Ports are taken from below the range from which the kernel serves outgoing
// connections (32768 and up unless configured otherwise): between our choice
// and the server's bind no outgoing connection can then take the port away.
const (
	lowestPort   = 20000
	highestPort  = 32000
	portAttempts = 2000
)

// freePorts finds count distinct ports that nobody listens on.
func freePorts(host string, count int) ([]int, error) {
	var ports []int
	var lastErr error
	for range portAttempts {
		port := lowestPort + rand.IntN(highestPort-lowestPort)
		listener, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err != nil {
			lastErr = err
			continue
		}
		// Kept open until all are found, so that none is found twice.
		defer listener.Close()
		if ports = append(ports, port); len(ports) == count {
			return ports, nil
		}
	}
	return nil, fmt.Errorf("finding %d free ports between %d and %d: %w", count, lowestPort, highestPort, lastErr)
}

// isPipe tells whether somebody holds the other end of the file: a parent that
// wants us to end with it. A terminal or /dev/null says nothing about a parent.
func isPipe(file *os.File) bool {
	info, err := file.Stat()
	return err == nil && info.Mode()&(os.ModeNamedPipe|os.ModeSocket) != 0
}

// waitForEOF returns when the other end of the pipe is closed.
func waitForEOF(pipe io.Reader) {
	_, _ = io.Copy(io.Discard, pipe)
}

// writeFileAtomically makes the whole text appear at path at once, so that a
// reader who finds the file finds a complete address.
func writeFileAtomically(path, text string) error {
	temporary, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".tmp-*")
	if err != nil {
		return err
	}
	defer os.Remove(temporary.Name()) // fails, as it should, once the file is renamed
	if _, err := temporary.WriteString(text); err != nil {
		temporary.Close()
		return err
	}
	if err := temporary.Close(); err != nil {
		return err
	}
	return os.Rename(temporary.Name(), path)
}
