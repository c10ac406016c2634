"""What every computation uses: linear algebra, memory, progress, measurement, files, tuning constants."""
