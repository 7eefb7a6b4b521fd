// Command holdfast orchestrates RL rollouts on a shared pool of inference engines.
package main

import (
	"os"

	"holdfast/orchestrator/cli"
)

func main() {
	os.Exit(cli.Main(os.Args[1:], os.Stdout, os.Stderr))
}
