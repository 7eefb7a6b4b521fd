package cli

import (
	"fmt"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"holdfast/orchestrator/config"
)

func newConfig() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Print the configuration in force, secrets masked",
		Long: `Prints the configuration that the other commands would use, as YAML: defaults, then
the file, then the environment (HOLDFAST_DATABASE__URL is database.url), then flags.`,
		Args: cobra.NoArgs,
	}
	flags := addConfigFlags(cmd, config.Default(), poolFlags, databaseFlags, temporalFlags, routerFlags, limitFlags, devFlags, logFlags)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := flags.load((*config.Config).ValidateDev)
		if err != nil {
			return err
		}
		text, err := yaml.Marshal(config.Map(cfg.Masked()))
		if err != nil {
			return fmt.Errorf("printing the configuration: %w", err)
		}
		_, err = cmd.OutOrStdout().Write(text)
		return err
	}
	return cmd
}
